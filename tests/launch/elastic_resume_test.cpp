// A checkpoint belongs to no layout: what one wrote loads under any other with the same bits.
#include <map>

#include "launch/checkpoint.h"
#include "tests/support/parity.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

using Values = std::map<std::string, std::vector<double>>;

constexpr const char* kModel =
    "layers: 4, heads: 4, kv_heads: 2, bias: true, moe: {num_experts: 7, top_k: 3, hidden: 9, "
    "shared_experts: 1, "
    "first_dense: 1, router: {kind: top_k, score: sigmoid, bias_rate: 0.01}}";

/// Trains two steps without a checkpoint to start from, else only loads it; saves step `step`. Returns
/// weights, router biases and moments by name.
Values load_and_save(const TemporaryFolder& folder, ParityCase c, int ranks, int64_t step) {
  c.model = kModel;
  Values values;
  run_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, parity_layout(c, ranks));
    TrainEngine engine(parity_engine(c), mesh);
    CheckpointStore store({.folder = folder.path(), .keep_last = 0}, *world);
    if (const auto found = store.find()) {
      EXPECT_EQ(found->step, step - 1);
      store.load(*found, engine.state());
    } else {
      for (int64_t s = 0; s < 2; s++) {
        const std::vector<ModelBatch> batches = {parity_batch(s, 0, kParityBatch)};
        EXPECT_TRUE(engine.step(batches, 1e-2).updated);
      }
    }
    EXPECT_EQ(store.save(step, engine.state(), "{}", ""), "");
    Values mine;
    for (const StateTensor& t : engine.state())
      mine[t.name] =
          gather_global(HeldPart(t.value, t.is_flat ? t.boxes : std::vector{t.box}), t.global_shape, *world);
    if (world->rank() == 0) values = std::move(mine);
  });
  return values;
}

TEST(ElasticResume, OneEightThreeOneRanksWithNoStepBetweenKeepEveryBit) {
  const TemporaryFolder folder;
  const Values want = load_and_save(folder, {}, 1, 1);
  EXPECT_GT(want.size(), 100U);
  int64_t step = 1;
  const auto layout = [](int ep, int tp, int etp, int pp, int cp, int zero = 0) {
    ParityCase c;
    c.zero = zero;
    c.ep = ep;
    c.tp = tp;
    c.etp = etp;
    c.pp = pp;
    c.cp = cp;
    return c;
  };
  for (const auto& [c, ranks] : {std::pair{layout(2, 2, 2, 2, 1, 1), 8},
                                 {layout(3, 1, 1, 1, 1, 2), 3},
                                 {layout(1, 1, 1, 1, 1), 1},
                                 {layout(2, 2, 1, 2, 1, 3), 8},
                                 {layout(4, 2, 2, 1, 2, 1), 8},
                                 {layout(1, 1, 1, 1, 1, 3), 3},
                                 {layout(1, 1, 1, 2, 1, 2), 4},
                                 {layout(7, 1, 1, 1, 1), 7},
                                 {layout(1, 1, 1, 1, 1), 1}}) {
    const Values got = load_and_save(folder, c, ranks, ++step);
    ASSERT_EQ(got.size(), want.size());
    for (const auto& [name, values] : want) EXPECT_EQ(got.at(name), values) << name << ' ' << c.name(ranks);
  }
}

}  // namespace
}  // namespace shoal::testing
