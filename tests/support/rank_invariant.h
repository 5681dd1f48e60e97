// Comparisons of run.deterministic: rank_invariant with one rank, to the last bit.
#pragma once

#include <gtest/gtest.h>

#include <cstring>

#include "core/ops/linear.h"
#include "tests/support/parity.h"

namespace shoal::testing {

/// Where OpenBLAS multiplies (SHOAL_GEMM, or a CPU without AVX2) the mode is refused.
class RankInvariant : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!rows_are_independent(Device{}, DType::f32))
      GTEST_SKIP() << "OpenBLAS multiplies, so the mode is refused";
  }
};

/// Equal to the last bit; the message names the first tensor that differs.
inline ::testing::AssertionResult equal_bits(const ParityResult& got, const ParityResult& want) {
  const auto differ = [](const std::vector<double>& a, const std::vector<double>& b) {
    return a.size() != b.size() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) != 0;
  };
  if (got.counts != want.counts || got.dropped != want.dropped)
    return ::testing::AssertionFailure() << "expert counts or drops differ";
  for (const auto& [what, a, b] :
       {std::tuple{"loss", got.losses, want.losses}, std::tuple{"aux loss", got.aux_losses, want.aux_losses},
        std::tuple{"z loss", got.z_losses, want.z_losses},
        std::tuple{"grad norm", got.grad_norms, want.grad_norms},
        std::tuple{"entropy", got.entropies, want.entropies}})
    if (differ(a, b)) return ::testing::AssertionFailure() << what << " differs";
  for (const auto& [what, a, b] : {std::tuple{"gradient of ", &got.gradients, &want.gradients},
                                   std::tuple{"", &got.state, &want.state}}) {
    if (a->size() != b->size()) return ::testing::AssertionFailure() << "different tensors";
    for (const auto& [name, values] : *b)
      if (differ(a->at(name), values)) return ::testing::AssertionFailure() << what << name << " differs";
  }
  return ::testing::AssertionSuccess();
}

/// The same settings on one rank, in one micro-batch.
inline ParityCase on_one_rank(ParityCase c) {
  c.ep = c.pp = c.virtual_stages = 1;
  c.accumulation = c.chunks = 1;
  c.dispatcher = "local";
  c.schedule = "1f1b";
  c.zero = c.ranks_per_node = 0;
  c.stage_layers = {};
  c.empty_ranks = false;
  c.recompute = "none";
  return c;
}

}  // namespace shoal::testing
