// The parity table with ranks that are processes: every layout of the same global batch against one rank, and
// against ranks as threads bit for bit. See tests/parity for the table with threads.
#include "tests/mpi/mpi_world.h"
#include "tests/parity/expect_parity.h"
#include "tests/support/rank_invariant.h"

namespace shoal::testing {
namespace {

const ParityResult& one_rank_result(const ParityCase& c) {
  static std::map<std::string, ParityResult> results;
  const ParityCase one = one_rank(c);
  const std::string key = one.name(1) + one.model;
  if (!results.contains(key)) results[key] = run_parity(one, make_single_communicator());
  return results[key];
}

void expect_parity(const ParityCase& c) {
  EXPECT_TRUE(same_result(run_parity(c, mpi_world()), one_rank_result(c), tolerance_of(c.dtype)))
      << c.name(mpi_world()->size());
}

/// Expert-parallel sizes that this world and the experts allow.
std::vector<int> expert_sizes() {
  std::vector<int> sizes;
  for (int ep = 1; ep <= mpi_world()->size(); ep++) {
    if (mpi_world()->size() % ep == 0 && kParityExperts % ep == 0) sizes.push_back(ep);
  }
  return sizes;
}

struct Table {
  std::string balance, capacity;
  DType dtype;
  friend std::ostream& operator<<(std::ostream& out, const Table& t) {
    return out << t.balance << ", capacity " << t.capacity << ", " << t.dtype;
  }
};

class LayoutsOverMpi : public ::testing::TestWithParam<Table> {};

TEST_P(LayoutsOverMpi, GiveTheResultOfOneRank) {
  const auto& [balance, capacity, dtype] = GetParam();
  for (const int ep : expert_sizes()) {
    for (const int64_t accumulation : {1, 2}) {
      for (const char* dispatcher : {"all_to_all", "all_gather"}) {
        expect_parity({.ep = ep,
                       .accumulation = accumulation,
                       .dispatcher = dispatcher,
                       .balance = balance,
                       .capacity = capacity,
                       .dtype = dtype,
                       .model = ""});
      }
    }
  }
}

std::vector<Table> tables() {
  std::vector<Table> all;
  for (const char* balance : {"none", "sequence", "global", "z_loss", "bias"}) {
    all.push_back({balance, "off", DType::f64});
  }
  for (const char* balance : {"global", "bias"}) {
    for (const char* capacity : {"position", "probability"}) all.push_back({balance, capacity, DType::f64});
  }
  all.push_back({"sequence", "position", DType::f32});
  all.push_back({"bias", "off", DType::f32});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Mpi, LayoutsOverMpi, ::testing::ValuesIn(tables()), [](const auto& info) {
  return info.param.balance + "_capacity_" + info.param.capacity + "_" + dtype_name(info.param.dtype);
});

TEST(ParityMpi, TensorParallelRanksGiveTheResultOfOneRank) {
  const int world = mpi_world()->size();
  for (const char* model : {"heads: 4, kv_heads: 4", "heads: 12, kv_heads: 1, head_size: 4, bias: true"}) {
    for (const int ep : expert_sizes()) {
      expect_parity({.ep = ep, .tp = world, .balance = "sequence", .capacity = "position", .model = model});
      if (world % 2 == 0)
        expect_parity({.ep = ep, .tp = 2, .accumulation = 2, .balance = "bias", .model = model});
    }
  }
}

TEST(ParityMpi, ExpertTensorParallelRanksAndUnevenExpertsGiveTheResultOfOneRank) {
  const int world = mpi_world()->size();
  const char* const kModel = "bias: true, moe: {num_experts: 7, top_k: 3, hidden: 9, shared_experts: 1}";
  for (const int ep : {1, world / 2, world}) {
    if (ep == 0 || world % ep != 0) continue;
    expect_parity({.ep = ep, .etp = world / ep, .accumulation = 2, .model = kModel});
    expect_parity({.ep = ep, .tp = world % 2 == 0 ? 2 : 1, .model = kModel});
  }
}

TEST(ParityMpi, PipelineStagesGiveTheResultOfOneRank) {
  const int world = mpi_world()->size();
  const char* const model = "layers: 4, kv_heads: 2";
  for (const char* schedule : {"1f1b", "gpipe", "interleaved", "zero_bubble"}) {
    for (const char* balance : {"global", "bias"}) {
      ParityCase c{
          .accumulation = world, .balance = balance, .model = model, .pp = world, .schedule = schedule};
      if (world <= 4) expect_parity(c);
      if (schedule == std::string("interleaved") && world % 2 == 0) c.virtual_stages = 2;
      c.pp = 2;
      if (world % 2 == 0) expect_parity(c);
      c.ep = c.tp = 2;
      if (world % 4 == 0) expect_parity(c);
    }
  }
}

TEST(ParityMpi, DispatchOverTwoLevelsGivesTheResultOfOneRank) {
  const int world = mpi_world()->size();
  for (const int per_node : {0, 1, 2}) {
    if (per_node > 0 && world % per_node != 0) continue;
    expect_parity({.ep = world,
                   .dispatcher = "hierarchical",
                   .balance = "bias",
                   .model = "moe: {num_experts: 7, top_k: 3, hidden: 8}",
                   .ranks_per_node = per_node});
  }
}

TEST(ParityMpi, ContextParallelRanksGiveTheResultOfOneRank) {
  const int world = mpi_world()->size();
  for (const ContextKind kind : {ContextKind::all_gather, ContextKind::ring}) {
    for (const int ep : expert_sizes()) {
      for (const int64_t seq : {3, 13}) {
        expect_parity({.ep = ep,
                       .cp = world,
                       .balance = "sequence",
                       .capacity = "position",
                       .context = kind,
                       .seq = seq});
        if (world % 2 != 0) continue;
        expect_parity({.ep = ep,
                       .tp = world / 2,
                       .cp = 2,
                       .accumulation = 2,
                       .balance = "bias",
                       .model = "heads: 4, kv_heads: 2",
                       .context = kind,
                       .seq = seq,
                       .documents = true});
      }
    }
  }
}

TEST(ParityMpi, ZeroStagesGiveTheResultOfOneRank) {
  const int world = mpi_world()->size();
  for (const int zero : {1, 2, 3}) {
    for (const int ep : expert_sizes()) {
      expect_parity({.ep = ep, .accumulation = 2, .balance = "bias", .model = "bias: true", .zero = zero});
      expect_parity(
          {.ep = ep, .tp = world, .balance = "sequence", .model = "heads: 4, kv_heads: 4", .zero = zero});
      if (world == 4)
        expect_parity({.ep = ep, .tp = 2, .balance = "bias", .model = "kv_heads: 2", .zero = zero});
      if (world % 2 == 0)
        expect_parity(
            {.ep = ep, .cp = 2, .accumulation = 2, .balance = "bias", .model = "kv_heads: 2", .zero = zero});
    }
  }
  if (world % 4 != 0) return;  // stages of two ranks or more
  for (const auto& [zero, schedule] : {std::pair{2, "1f1b"}, {3, "interleaved"}, {3, "zero_bubble"}})
    expect_parity({.ep = 2,
                   .accumulation = 2,
                   .balance = "bias",
                   .model = "layers: 4",
                   .pp = 2,
                   .virtual_stages = std::string(schedule) == "interleaved" ? 2 : 1,
                   .schedule = schedule,
                   .zero = zero});
}

class RankInvariantMpi : public RankInvariant {};

TEST_F(RankInvariantMpi, EveryLayoutGivesTheBitsOfOneRank) {
  const int world = mpi_world()->size();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    ParityCase settings{.balance = "bias", .dtype = dtype, .model = "layers: 4"};
    settings.rank_invariant = true;
    const ParityResult want = run_parity(on_one_rank(settings), make_single_communicator());
    const auto expect_bits = [&](ParityCase c) {
      c.balance = settings.balance;
      c.dtype = dtype;
      c.model = settings.model;
      c.rank_invariant = true;
      EXPECT_TRUE(equal_bits(run_parity(c, mpi_world()), want)) << c.name(world);
    };
    for (const int ep : expert_sizes()) {
      for (const char* dispatcher : {"all_to_all", "all_gather"})
        expect_bits({.ep = ep, .accumulation = 2, .dispatcher = dispatcher, .model = ""});
      expect_bits({.ep = ep, .model = "", .chunks = 2, .zero = 1});
      expect_bits({.ep = ep, .accumulation = 3, .empty_ranks = true, .model = ""});
    }
    if (world <= 4) expect_bits({.model = "", .pp = world, .schedule = "zero_bubble"});
    if (world % 2 == 0) expect_bits({.ep = world / 2, .model = "", .pp = 2, .zero = 1});
  }
}

TEST(ParityMpi, RanksWithoutAnySequenceChangeNothing) {
  for (const int ep : expert_sizes()) {
    expect_parity(
        {.ep = ep, .balance = "sequence", .capacity = "position", .empty_ranks = true, .model = ""});
    expect_parity({.ep = ep, .balance = "bias", .empty_ranks = true, .model = ""});
  }
}

TEST(ParityMpi, UnevenSequencesPerRankAndMicroBatchChangeNothing) {
  expect_parity({.ep = 1, .accumulation = 3, .balance = "global", .model = ""});
  expect_parity({.ep = mpi_world()->size(),
                 .accumulation = 3,
                 .balance = "sequence",
                 .model = "moe: {num_experts: 12, top_k: 2, hidden: 8, first_dense: 1, router: {kind: top_k, "
                          "score: softmax, aux_coeff: 0.5}}"});
}

TEST(ParityMpi, RecomputeChangesNothing) {
  for (const int ep : expert_sizes()) {
    for (const char* recompute : {"block", "[norms, activations, up_projections]"}) {
      expect_parity({.ep = ep,
                     .accumulation = 2,
                     .balance = "global",
                     .capacity = "position",
                     .recompute = recompute,
                     .model = ""});
    }
  }
}

/// Exactly equal, with the name of the first difference.
::testing::AssertionResult same_bits(const ParityResult& a, const ParityResult& b) {
  if (a.losses != b.losses) return ::testing::AssertionFailure() << "losses differ";
  if (a.aux_losses != b.aux_losses) return ::testing::AssertionFailure() << "auxiliary losses differ";
  if (a.z_losses != b.z_losses) return ::testing::AssertionFailure() << "z losses differ";
  if (a.grad_norms != b.grad_norms) return ::testing::AssertionFailure() << "gradient norms differ";
  if (a.counts != b.counts || a.dropped != b.dropped)
    return ::testing::AssertionFailure() << "expert counts or drops differ";
  for (const auto& [name, values] : a.gradients) {
    if (values != b.gradients.at(name)) return ::testing::AssertionFailure() << "gradient of " << name;
  }
  for (const auto& [name, values] : a.state) {
    if (values != b.state.at(name)) return ::testing::AssertionFailure() << name;
  }
  return ::testing::AssertionSuccess();
}

TEST(ParityMpi, ProcessesGiveTheBitsOfThreads) {
  for (const int ep : expert_sizes()) {
    for (const char* dispatcher : {"all_to_all", "all_gather"}) {
      for (const DType dtype : {DType::f32, DType::f64}) {
        const ParityCase c{.ep = ep,
                           .accumulation = 2,
                           .dispatcher = dispatcher,
                           .balance = ep == 1 ? "bias" : "global",
                           .capacity = ep == 1 ? "off" : "probability",
                           .dtype = dtype,
                           .model = ""};
        const ParityResult processes = run_parity(c, mpi_world());
        ParityResult threads;
        run_ranks(mpi_world()->size(), [&](const std::shared_ptr<Communicator>& world) {
          ParityResult mine = run_parity(c, world);
          if (world->rank() == mpi_world()->rank()) threads = std::move(mine);
        });
        EXPECT_TRUE(same_bits(processes, threads)) << c.name(mpi_world()->size());
      }
    }
  }
}

TEST(ParityMpi, ZeroStagesGiveTheBitsOfReplicasThatDoEverythingAlike) {
  for (const int ep : expert_sizes()) {
    ParityCase c{.ep = ep, .balance = "bias", .dtype = DType::f32, .model = "bias: true"};
    const ParityResult want = run_parity(c, mpi_world());
    for (const int zero : {1, 2, 3}) {
      c.zero = zero;
      ParityResult got = run_parity(c, mpi_world());
      EXPECT_TRUE(close(got.grad_norms, want.grad_norms, {1e-13, 0}));  // squares in another order
      got.grad_norms = want.grad_norms;
      EXPECT_TRUE(same_bits(got, want)) << c.name(mpi_world()->size());
    }
  }
}

// The comparison must be able to fail.
TEST(ParityMpi, SeesADifferentResult) {
  const ParityCase c{.ep = 1, .balance = "bias", .model = ""};
  ParityCase other = c;
  other.model = "init: {std: 0.3000001}";
  const ParityResult got = run_parity(other, mpi_world());
  EXPECT_FALSE(same_result(got, one_rank_result(c), 1e-11));
  EXPECT_FALSE(same_bits(got, run_parity(c, mpi_world())));
}

}  // namespace
}  // namespace shoal::testing
