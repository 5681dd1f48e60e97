// Expert choice: balance by construction, gradients, layout independence, causal evaluation.
#include <gtest/gtest.h>

#include "core/autograd/tape.h"
#include "core/base/log.h"
#include "tests/support/expect_close.h"
#include "tests/support/parity.h"
#include "tests/support/tiny_model.h"

namespace shoal::testing {
namespace {

const char* const kModel =
    "layers: 1, hidden_size: 16, heads: 2, init: {std: 0.4}, "
    "moe: {num_experts: 4, top_k: 2, hidden: 8, router: expert_choice}";

ForwardContext context_for(const ModelBatch& batch, Pass pass) {
  ForwardContext context;
  context.pass = pass;
  context.totals = StepTotals{batch.tokens_T.numel(), batch.tokens_T.numel(), 1};
  return context;
}

class ExpertChoice : public ::testing::Test {
 protected:
  void SetUp() override { log::set_quiet(true); }
};

TEST_F(ExpertChoice, EveryExpertTakesTheSameNumberOfTokensOfEachSequence) {
  const TinyModel tiny(kModel, 19, 6);
  const ModelBatch batch = batch_of({{1, 2, 3, 4, 5, 6}, {7, 9, 7, 8, 3, 8}});
  Tape tape;
  tiny.model->loss(batch, context_for(batch, Pass::train));
  // C = ceil(2 * 6 / 4) = 3 tokens per expert and sequence, two sequences.
  EXPECT_EQ(tiny.model->end_step(false).at(0).counts_E, (std::vector<int64_t>{6, 6, 6, 6}));
}

TEST_F(ExpertChoice, GradientsMatchNumericOnes) {
  const TinyModel tiny(kModel, 19, 5);
  const ModelBatch batch = batch_of({{1, 2, 3, 4, 5}});
  auto loss = [&] {
    const NoGrad no_grad;
    return tiny.model->loss(batch, context_for(batch, Pass::train)).total.item();
  };
  {
    Tape tape;
    tape.backward(tiny.model->loss(batch, context_for(batch, Pass::train)).total);
  }
  Parameter& weight = tiny.parameter("layers.0.moe.router.weight");
  for (const int64_t i : {0, 17, 40, 63}) {
    double* value = weight.value.data<double>() + i;
    const double before = *value, step = 1e-6;
    *value = before + step;
    const double up = loss();
    *value = before - step;
    const double down = loss();
    *value = before;
    EXPECT_NEAR(weight.leaf.grad.data<double>()[i], (up - down) / (2 * step), 1e-7) << i;
  }
}

// In evaluation later tokens must not matter; in training they do, which is what the warning says.
TEST_F(ExpertChoice, EvaluationIsCausalTrainingIsNot) {
  const TinyModel tiny(kModel, 19, 6);
  const NoGrad no_grad;
  const ModelBatch a = batch_of({{1, 2, 3, 4, 5, 6}}), b = batch_of({{1, 2, 3, 14, 15, 16}});
  auto early = [&](const ModelBatch& batch, Pass pass) {
    return tiny.model->logits(batch, context_for(batch, pass)).rows(0, 3);
  };
  EXPECT_TRUE(close(early(a, Pass::evaluate), early(b, Pass::evaluate), {0, 0}));
  EXPECT_FALSE(close(early(a, Pass::train), early(b, Pass::train), {1e-9, 1e-9}));
}

TEST_F(ExpertChoice, TrainsTheSameOnEveryLayout) {
  auto run = [&](int world, int ep, int64_t accumulation) {
    ParityResult result;
    run_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
      ParityCase mine;
      mine.ep = ep;
      mine.accumulation = accumulation;
      mine.model = "moe: {num_experts: 8, top_k: 2, hidden: 8, router: expert_choice}";
      ParityResult r = run_parity(mine, comm);
      if (comm->rank() == 0) result = std::move(r);
    });
    return result;
  };
  const ParityResult one = run(1, 1, 1);
  EXPECT_TRUE(same_result(run(2, 2, 2), one, 1e-11));
  EXPECT_TRUE(same_result(run(4, 2, 1), one, 1e-11));
}

TEST_F(ExpertChoice, TooManyExpertsAreRefused) {
  EXPECT_THROW(
      TinyModel(
          "layers: 1, hidden_size: 8, heads: 1, moe: {num_experts: 65, hidden: 8, router: expert_choice}", 5,
          4),
      UsageError);
}

}  // namespace
}  // namespace shoal::testing
