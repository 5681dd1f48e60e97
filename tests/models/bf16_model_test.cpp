// bf16 mixed precision through a whole model: gradients near the exact ones, decoding, f32 masters,
// positions.
#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/tape.h"
#include "launch/engine.h"
#include "tests/support/expect_close.h"
#include "tests/support/tiny_model.h"

namespace shoal::testing {
namespace {

// Every expert is chosen, so that no rounded score can change a choice.
const char* const kGatedMoe =
    "layers: 2, hidden_size: 32, heads: 4, kv_heads: 2, init: {std: 0.2}, tie_embeddings: false, moe: "
    "{num_experts: 4, top_k: 4, hidden: 16, shared_experts: 1, shared_gate: true, router: {kind: top_k, "
    "aux_coeff: "
    "0.1, z_coeff: 0.1}}";
const char* const kDense =
    "layers: 2, hidden_size: 32, heads: 2, bias: true, position: learned, norm: {kind: layer_norm, "
    "placement: post}, "
    "ffn: {activation: gelu}, init: {std: 0.2}";

ModelBatch some_batch() {
  return batch_of({{1, 2, 3, 1, 5, 8, 9}, {6, 7, 8, 9, 10, 0, 2}, {3, 3, 4, 1, 0, 2, 7}});
}

struct Result {
  double loss = 0;
  std::map<std::string, std::vector<double>> gradients;
};

Result run(const std::string& settings, DType dtype) {
  const TinyModel tiny(settings, 11, 7, dtype);
  const ModelBatch batch = some_batch();
  ForwardContext context;
  context.totals = StepTotals{18, 21, 1};
  Tape tape;
  const LossTerms terms = tiny.model->loss(batch, context);
  tape.backward(terms.total);
  Result result{terms.total.item(), {}};
  for (Parameter* p : tiny.model->parameters()) result.gradients[p->name] = to_doubles(p->leaf.grad);
  return result;
}

double norm(const std::vector<double>& v) {
  double sum = 0;
  for (const double x : v) sum += x * x;
  return std::sqrt(sum);
}

TEST(Bf16Model, GradientsOfEveryParameterAreNearTheExactOnes) {
  for (const char* settings : {kGatedMoe, kDense}) {
    const Result exact = run(settings, DType::f64), got = run(settings, DType::bf16);
    EXPECT_NEAR(got.loss, exact.loss, 0.01 * exact.loss);
    EXPECT_NE(got.loss, run(settings, DType::f32).loss) << "the model did not compute in bf16";
    double largest = 0;
    for (const auto& [name, want] : exact.gradients) largest = std::max(largest, norm(want));
    for (const auto& [name, want] : exact.gradients) {
      std::vector<double> difference = got.gradients.at(name);
      for (size_t i = 0; i < want.size(); i++) difference[i] -= want[i];
      // A few roundings of 2^-9 each; gradients that are zero up to rounding are measured by the largest one.
      EXPECT_LE(norm(difference), 0.03 * norm(want) + 2e-4 * largest) << settings << ": " << name;
    }
  }
}

TEST(Bf16Model, DecodingWithACacheGivesTheBitsOfTheFullPass) {
  for (const char* settings : {kGatedMoe, kDense}) {
    const TinyModel tiny(settings, 11, 7, DType::bf16);
    const NoGrad no_grad;
    ForwardContext context;
    context.pass = Pass::evaluate;
    const std::vector<int32_t> tokens = {1, 2, 3, 1, 5, 8, 9};
    const Tensor all = tiny.model->logits(batch_of({tokens}), context);
    EXPECT_EQ(all.dtype(), DType::f32);
    DecodeState state = tiny.model->make_decode_state(1, 7);
    Tensor got = tiny.model->next_logits(Tensor::from(std::vector<int32_t>{1, 2, 3}, Shape{3}), state);
    for (int64_t s = 2; s < 7; s++) {
      EXPECT_TRUE(close(got, all.rows(s, s + 1), {0, 0})) << settings << " position " << s;
      if (s == 6) break;
      got = tiny.model->next_logits(
          Tensor::from(std::vector<int32_t>{tokens[static_cast<size_t>(s + 1)]}, Shape{1}), state);
    }
  }
}

EngineOptions engine_options(bool bf16) {
  EngineOptions options;
  options.model = Choice{"transformer", transformer_options(kGatedMoe)};
  options.optimizer = Choice{"adamw", nullptr};
  options.dispatcher = Choice{"local", nullptr};
  options.vocab_size = 11;
  options.seq_len = 7;
  options.bf16 = bf16;
  return options;
}

// Each update is far below half a bf16 step of a weight of the embedding's size; together they are many.
TEST(Bf16Model, NM_01_UpdatesBelowTheSpacingOfBf16AddUp) {
  const Mesh mesh(make_single_communicator(), ParallelLayout{});
  std::vector<double> moved[2], losses[2];
  for (const bool bf16 : {false, true}) {
    TrainEngine engine(engine_options(bf16), mesh);
    std::vector<double> before, after;
    const auto values = [&](std::vector<double>& into) {
      for (Parameter* p : engine.parameters()) {
        EXPECT_EQ(p->value.dtype(), DType::f32) << p->name;
        EXPECT_EQ(p->leaf.grad.dtype(), DType::f32) << p->name;
        for (const double v : to_doubles(p->value)) into.push_back(v);
      }
    };
    values(before);
    const std::vector<ModelBatch> batches = {some_batch()};
    for (int i = 0; i < 200; i++) losses[bf16].push_back(engine.step(batches, 1e-4).loss);
    values(after);
    for (size_t i = 0; i < before.size(); i++) moved[bf16].push_back(after[i] - before[i]);
  }
  EXPECT_NEAR(norm(moved[1]), norm(moved[0]), 0.05 * norm(moved[0]));
  EXPECT_LT(losses[1].back(), 0.95 * losses[1].front());
  for (size_t i = 0; i < losses[0].size(); i++)
    EXPECT_NEAR(losses[1][i], losses[0][i], 0.01 * losses[0][i]) << i;
}

}  // namespace
}  // namespace shoal::testing
