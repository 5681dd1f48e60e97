// The transformer as a whole: initial loss, gradients, masking, padding, decoding.
#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/tape.h"
#include "tests/support/expect_close.h"
#include "tests/support/tiny_model.h"

namespace shoal::testing {
namespace {

const char* const kSmall = "layers: 2, hidden_size: 16, heads: 4, kv_heads: 2, init: {std: 0.3}";
const char* const kMoe =
    "layers: 2, hidden_size: 16, heads: 4, kv_heads: 2, init: {std: 0.3}, moe: {num_experts: 4, top_k: 2, "
    "hidden: 8, "
    "shared_experts: 1, router: {kind: top_k, aux_coeff: 0.3, z_coeff: 0.1}}";

ForwardContext context_for(const ModelBatch& batch, Pass pass = Pass::train) {
  ForwardContext context;
  context.pass = pass;
  context.totals.tokens = batch.tokens_T.numel();
  context.totals.labels = 0;
  for (const int32_t label : batch.labels_T.to_vector<int32_t>()) context.totals.labels += label >= 0;
  return context;
}

double loss_of(const TinyModel& tiny, const ModelBatch& batch) {
  const NoGrad no_grad;
  return tiny.model->loss(batch, context_for(batch)).total.item();
}

TEST(Transformer, StartsNearTheEntropyOfAUniformGuess) {
  const TinyModel tiny("layers: 2, hidden_size: 32, heads: 4", 65, 8);
  const ModelBatch batch = batch_of({{1, 2, 3, 4, 5, 6, 7, 8}, {9, 10, 11, 12, 13, 14, 15, 16}});
  EXPECT_NEAR(loss_of(tiny, batch), std::log(65.0), 0.1);
}

// Central differences of single weights of every parameter against the tape, through the whole model.
TEST(Transformer, WholeModelGradientsMatchNumericOnes) {
  for (const char* settings : {kMoe,
                               "layers: 2, hidden_size: 12, heads: 2, bias: true, position: learned, "
                               "tie_embeddings: false, norm: {kind: layer_norm, "
                               "placement: post}, ffn: {activation: gelu}, init: {std: 0.3}",
                               "layers: 2, hidden_size: 16, heads: 4, kv_heads: 1, position: alibi, "
                               "recompute: block, init: {std: 0.3}, moe: {num_experts: 4, "
                               "top_k: 1, hidden: 8}"}) {
    const TinyModel tiny(settings, 11, 5);
    const ModelBatch batch = batch_of({{1, 2, 3, 1, 5}, {6, 7, 8, 9, 10}});
    {
      Tape tape;
      tape.backward(tiny.model->loss(batch, context_for(batch)).total);
    }
    for (Parameter* p : tiny.model->parameters()) {
      ASSERT_TRUE(p->leaf.grad.defined()) << p->name;
      const int64_t n = p->value.numel();
      for (const int64_t i : {int64_t{0}, n / 2, n - 1}) {
        double* value = p->value.data<double>() + i;
        const double before = *value, step = 1e-5;
        *value = before + step;
        const double up = loss_of(tiny, batch);
        *value = before - step;
        const double down = loss_of(tiny, batch);
        *value = before;
        EXPECT_NEAR(p->leaf.grad.data<double>()[i], (up - down) / (2 * step), 2e-7)
            << p->name << " element " << i;
      }
    }
  }
}

TEST(Transformer, FutureTokensDoNotChangeEarlierLogits) {
  const TinyModel tiny(kMoe, 11, 6);
  const NoGrad no_grad;
  const ModelBatch a = batch_of({{1, 2, 3, 4, 5, 6}}), b = batch_of({{1, 2, 3, 9, 9, 9}});
  const Tensor x = tiny.model->logits(a, context_for(a, Pass::evaluate)),
               y = tiny.model->logits(b, context_for(b, Pass::evaluate));
  EXPECT_TRUE(close(x.rows(0, 3), y.rows(0, 3), {0, 0}));
  EXPECT_FALSE(close(x.rows(3, 4), y.rows(3, 4)));
}

TEST(Transformer, DT_01_MaskedDocumentsDoNotSeeEachOther) {
  const TinyModel tiny(kMoe, 11, 8);
  const NoGrad no_grad;
  ModelBatch a = batch_of({{1, 2, 3, 4, 5, 6, 7, 8}}), b = batch_of({{9, 9, 1, 2, 5, 6, 7, 8}});
  for (ModelBatch* batch : {&a, &b}) {
    batch->document_BS = Tensor::from(std::vector<int32_t>{0, 0, 0, 0, 1, 1, 1, 1}, Shape{1, 8});
    batch->positions_T = Tensor::from(std::vector<int32_t>{0, 1, 2, 3, 0, 1, 2, 3}, Shape{8});
  }
  const Tensor x = tiny.model->logits(a, context_for(a, Pass::evaluate)),
               y = tiny.model->logits(b, context_for(b, Pass::evaluate));
  EXPECT_TRUE(close(x.rows(4, 8), y.rows(4, 8), {0, 0}));
  // The second document alone gives the same logits.
  const ModelBatch alone = batch_of({{5, 6, 7, 8}});
  EXPECT_TRUE(
      close(tiny.model->logits(alone, context_for(alone, Pass::evaluate)), x.rows(4, 8), {1e-12, 1e-12}));
}

TEST(Transformer, PaddingChangesNothing) {
  const TinyModel tiny(kMoe, 11, 6);
  const ModelBatch plain = batch_of({{1, 2, 3, 4}});
  ModelBatch padded = batch_of({{1, 2, 3, 4, 0, 0}, {0, 0, 0, 0, 0, 0}});
  padded.labels_T =
      Tensor::from(std::vector<int32_t>{2, 3, 4, -1, -1, -1, -1, -1, -1, -1, -1, -1}, Shape{12});
  padded.valid_BS = Tensor::from(std::vector<uint8_t>{1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0}, Shape{12});
  auto run = [&](const ModelBatch& batch) {
    for (Parameter* p : tiny.model->parameters()) p->leaf.grad = {};
    ForwardContext context;
    context.totals = StepTotals{3, 4, 1};
    Tape tape;
    const LossTerms terms = tiny.model->loss(batch, context);
    tape.backward(terms.total);
    std::vector<double> all = {terms.lm.item()};
    for (const auto& of_layers : {terms.aux, terms.z})
      for (const Tensor& term : of_layers) all.push_back(term.item());
    for (Parameter* p : tiny.model->parameters()) {
      for (const double g : p->leaf.grad.to_vector<double>()) all.push_back(g);
    }
    return all;
  };
  const std::vector<double> without = run(plain);
  const auto counts = tiny.model->end_step(false);
  EXPECT_TRUE(close(run(padded), without, {1e-11, 1e-13}));
  const auto padded_counts = tiny.model->end_step(false);
  for (size_t l = 0; l < counts.size(); l++) {
    EXPECT_EQ(counts[l].counts_E, padded_counts[l].counts_E);
    EXPECT_EQ(counts[l].tokens, padded_counts[l].tokens);
    EXPECT_NEAR(counts[l].entropy, padded_counts[l].entropy, 1e-12);
  }
}

TEST(Transformer, DecodingWithACacheGivesTheLogitsOfTheFullPass) {
  for (const char* settings :
       {kSmall, kMoe, "layers: 2, hidden_size: 16, heads: 4, position: alibi, init: {std: 0.3}",
        "layers: 2, hidden_size: 16, heads: 4, position: learned, init: {std: 0.3}",
        "layers: 2, hidden_size: 16, heads: 4, position: sinusoidal, norm: {placement: post}, init: {std: "
        "0.3}"}) {
    const TinyModel tiny(settings, 11, 6);
    const ModelBatch full = batch_of({{1, 2, 3, 4, 5, 6}, {7, 8, 9, 10, 1, 2}});
    const NoGrad no_grad;
    const Tensor all = tiny.model->logits(full, context_for(full, Pass::evaluate));
    DecodeState state = tiny.model->make_decode_state(2, 6);
    // A prompt of three tokens at once, then one by one.
    Tensor got =
        tiny.model->next_logits(Tensor::from(std::vector<int32_t>{1, 2, 3, 7, 8, 9}, Shape{6}), state);
    for (int64_t s = 2; s < 6; s++) {
      for (const int64_t b : {0, 1}) {
        EXPECT_TRUE(close(got.rows(b, b + 1), all.rows(b * 6 + s, b * 6 + s + 1), {1e-11, 1e-12}))
            << settings << " position " << s;
      }
      if (s == 5) break;
      const std::vector<int32_t> row0 = {1, 2, 3, 4, 5, 6}, row1 = {7, 8, 9, 10, 1, 2};
      const auto next = static_cast<size_t>(s + 1);
      got = tiny.model->next_logits(Tensor::from(std::vector<int32_t>{row0[next], row1[next]}, Shape{2}),
                                    state);
    }
    EXPECT_THROW(tiny.model->next_logits(Tensor::from(std::vector<int32_t>{1, 1}, Shape{2}), state), Error);
  }
}

TEST(Transformer, EvaluationLeavesNoTrace) {
  const TinyModel tiny(
      "layers: 1, hidden_size: 16, heads: 2, moe: {num_experts: 4, hidden: 8, router: {kind: top_k, "
      "bias_rate: 0.1}}",
      11, 4);
  const ModelBatch batch = batch_of({{1, 2, 3, 4}});
  {
    const NoGrad no_grad;
    tiny.model->loss(batch, context_for(batch, Pass::evaluate));
  }
  const auto stats = tiny.model->end_step(true);
  EXPECT_EQ(stats.at(0).counts_E, (std::vector<int64_t>{0, 0, 0, 0}));
  EXPECT_EQ(stats.at(0).bias_max, 0);
}

}  // namespace
}  // namespace shoal::testing
