// The operations of core/ops on device tensors: the same program, forward and backward, as on the CPU.
#include "core/autograd/tape.h"
#include "core/ops/activation.h"
#include "core/ops/attention.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/embedding.h"
#include "core/ops/norm.h"
#include "core/ops/permute.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

constexpr int64_t kTokens = 6, kVocab = 12, kWidth = 16;

/// Everything of a model but products: table, rope, norms with residuals, gates, rows to experts and back,
/// loss. inputs: table, norm weights, ids, labels. Returns the loss and the gradients of the first two.
Tensors train(const Tensors& inputs) {
  const Device device = inputs[0].device();
  const DType dtype = inputs[0].dtype(), stats = stats_dtype(dtype);
  std::vector<Leaf> leaves(2);
  for (Leaf& leaf : leaves) leaf.grad_dtype = stats;
  Tensor table = inputs[0].clone(), weight = as(inputs[1], stats);
  table.grad_ref.leaf = &leaves[0];
  weight.grad_ref.leaf = &leaves[1];
  const Tensor rows = Tensor::from(std::vector<int64_t>{3, 0, 5, 0, 1}, {5}, device);
  const Tensor choices = Tensor::from(std::vector<int64_t>{0, 1, 0, 0, 1}, {5}, device);
  const Tensor slots =
      Tensor::from(std::vector<int64_t>{3, 1, -1, 4, -1, -1, 0, -1, -1, -1, 2, -1}, {6, 2}, device);
  AttentionSpec heads;
  heads.seq = kTokens;
  heads.head_size = 4;
  heads.heads = 2;
  const RopeSpec rope_spec{RopeForm::half, 0, 100};
  const Tensor rope_rows = rope_table(rope_spec, 4, kTokens, stats, device);
  const Tensor positions = Tensor::from(std::vector<int32_t>{0, 1, 2, 3, 4, 5}, {kTokens}, device);

  Tape tape;
  const Tensor x = embedding(table, inputs[2]);
  const Tensor turned = rope(mul(x, x).view({kTokens, 1, 4, 4}), heads, rope_spec, rope_rows, positions);
  const NormResult normed = add_rms_norm(turned.view({kTokens, kWidth}), x, weight, 1e-5);
  const Tensor gathered = gather_rows(normed.y_TD, rows, slots);
  const Tensor gates =
      Tensor::from(std::vector<double>{.5, .25, 1, 1, 0, 2, .1, .2, .3, .4, .5, .6}, {6, 2}).to(device);
  const Tensor combined = combine_rows(gathered, as(gates, stats), slots, rows, choices);
  const Tensor stream = add_layer_norm(combined, normed.sum_TD, weight, {}, 1e-5).sum_TD;
  const Tensor logits = gated_activate(mul(stream, scale(x, 3)), Activation::silu);
  const Tensor loss = cross_entropy(logits, inputs[3], 1.0 / kTokens);
  tape.backward(loss);
  return {loss.detach(), leaves[0].grad, leaves[1].grad};
}

TEST(CudaAutograd, AProgramHasTheLossAndTheGradientsOfTheCpu) {
  const Tensor ids = Tensor::from(std::vector<int32_t>{1, 11, 1, 0, 4, 1}, {kTokens});
  const Tensor labels = Tensor::from(std::vector<int32_t>{0, 7, -1, 3, 3, 5}, {kTokens});
  const Tensors inputs = {normal({kVocab, kWidth}, 1), normal({kWidth}, 2), ids, labels};
  expect_like_cpu(inputs, DType::f32, train, Tolerance{1e-4, 1e-5});
  expect_like_cpu(inputs, DType::f64, train, Tolerance{1e-11, 1e-12});
}

}  // namespace
}  // namespace shoal::testing
