// A layout against one rank, with ranks as threads; results of one rank are kept.
#pragma once

#include <map>

#include "tests/support/parity.h"

namespace shoal::testing {

inline double tolerance_of(DType dtype) {
  return dtype == DType::f64 ? 1e-11 : 1e-5;
}

inline ParityResult run_case(const ParityCase& c, int world_size) {
  ParityResult result;
  run_ranks(world_size, [&](const std::shared_ptr<Communicator>& world) {
    ParityResult mine = run_parity(c, world);
    if (world->rank() == 0) result = std::move(mine);
  });
  return result;
}

inline ParityCase one_rank(ParityCase c) {
  c.ep = 1;
  c.tp = 1;
  c.etp = 1;
  c.cp = 1;
  c.zero = 0;
  c.context = ContextKind::all_gather;
  c.pp = 1;
  c.virtual_stages = 1;
  c.schedule = "1f1b";
  c.stage_layers = {};
  c.accumulation = 1;
  c.dispatcher = "local";
  c.empty_ranks = false;
  c.recompute = "none";
  c.chunks = 1;
  c.ranks_per_node = 0;
  return c;
}

inline void expect_parity(const ParityCase& c, int world) {
  static std::map<std::string, ParityResult> references;
  const ParityCase base = one_rank(c);
  const std::string key = base.name(1) + c.model;
  if (!references.contains(key)) references[key] = run_case(base, 1);
  EXPECT_TRUE(same_result(run_case(c, world), references[key], tolerance_of(c.dtype))) << c.name(world);
}

/// Logits of a prompt and of one more token, and sums of an evaluation, as the last rank has them.
inline std::vector<double> decode_and_evaluate(const ParityCase& c, int ranks) {
  std::vector<double> all;
  run_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, parity_layout(c, ranks));
    TrainEngine engine(parity_engine(c), mesh);
    std::vector<double> mine;
    const auto keep = [&](const std::vector<double>& values) {
      mine.insert(mine.end(), values.begin(), values.end());
    };
    DecodeState state = engine.model().make_decode_state(2, 5);
    const Tensor prompt = Tensor::from(std::vector<int32_t>{3, 1, 4, 15, 9, 2}, {6}),
                 next = Tensor::from(std::vector<int32_t>{30, 0}, {2});
    keep(to_doubles(engine.model().next_logits(prompt, state)));
    keep(to_doubles(engine.model().next_logits(next, state)));
    const std::vector<ModelBatch> batches = {parity_batch(0, 0, 3), parity_batch(0, 3, 4)};
    const TrainEngine::LossSum sum = engine.evaluate(batches);
    keep({sum.loss, static_cast<double>(sum.labels)});
    if (world->rank() == ranks - 1) all = mine;
  });
  return all;
}

}  // namespace shoal::testing
