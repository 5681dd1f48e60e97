#include "core/ops/routing.h"

#include "core/autograd/tape.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

struct Case {
  int64_t tokens, experts;
  RouteSpec spec;
  int64_t tokens_per_group = 0;
  double aux = 0.5, z = 0.25;
};

RouteSpec spec_of(int64_t top_k, RouterScore score, bool normalize = true) {
  RouteSpec spec;
  spec.top_k = top_k;
  spec.score = score;
  spec.normalize = normalize;
  spec.weight_scale = 1.5;
  return spec;
}
RouteSpec grouped(RouteSpec spec, int64_t num_groups, int64_t top_groups, int64_t group_score_top) {
  spec.num_groups = num_groups;
  spec.top_groups = top_groups;
  spec.group_score_top = group_score_top;
  return spec;
}

/// inputs: logits, bias, validity, gradient of the weights. Returns ids and counts, which are exact, then
/// weights, entropy, aux loss, z-loss and the gradient of the logits.
Tensors route_and_back(const Tensors& in, const Case& c) {
  const DType dtype = in[0].dtype();
  Leaf leaf;
  leaf.grad_dtype = dtype;
  Tensor logits = in[0].clone();
  logits.grad_ref.leaf = &leaf;
  BalanceSpec balance;
  balance.aux_coeff = c.aux;
  balance.z_coeff = c.z;
  balance.total_tokens = 3 * std::max<int64_t>(1, c.tokens);
  balance.tokens_per_group = c.tokens_per_group;
  Tape tape;
  const Routed r = route(logits, in[1], in[2], c.spec, balance);
  Tensor total = sum(mul(r.weights_TK, in[3]));
  for (const Tensor& loss : {r.aux_loss, r.z_loss})
    if (loss.defined()) total = add(total, scale(loss, 2));
  tape.backward(total);
  return {r.expert_ids_TK,   r.counts_E, r.weights_TK.detach(), r.entropy, r.aux_loss.detach(),
          r.z_loss.detach(), leaf.grad};
}

Tensor some_valid(int64_t tokens) {
  std::vector<uint8_t> valid;
  for (int64_t t = 0; t < tokens; t++) valid.push_back(t % 5 == 3 ? 0 : 1);
  return Tensor::from(valid, {tokens});
}

void expect_routes_like_cpu(const Tensors& inputs, const Case& c) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    const auto body = [&](const Tensors& in) { return route_and_back(in, c); };
    expect_like_cpu(inputs, dtype, body,
                    dtype == DType::f32 ? Tolerance{2e-5, 2e-6} : Tolerance{1e-11, 1e-13});
    const NarrowLaunches narrow;
    const Tensors rounded = all_as(inputs, dtype), want = body(rounded), got = body(all_to(rounded, kCuda));
    EXPECT_TRUE(same_bits(got[0].to(kCpu), want[0])) << "ids of " << dtype;
    EXPECT_TRUE(same_bits(got[1].to(kCpu), want[1])) << "counts of " << dtype;
  }
}

Tensors inputs_of(const Case& c, bool bias, bool valid, uint64_t seed = 1) {
  return {normal({c.tokens, c.experts}, seed, 2), bias ? normal({c.experts}, seed + 1, 0.1) : Tensor{},
          valid ? some_valid(c.tokens) : Tensor{}, normal({c.tokens, c.spec.top_k}, seed + 2)};
}

TEST(CudaRouting, ScoresChoicesLossesAndGradientsAreThoseOfTheCpu) {
  for (const auto score : {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus}) {
    const Case cases[] = {{0, 4, spec_of(2, score), 0},         {1, 1, spec_of(1, score), 1},
                          {15, 7, spec_of(3, score, false), 5}, {10, 70, spec_of(8, score), 5},
                          {6, 40, spec_of(40, score), 0},       {9, 129, spec_of(5, score), 3}};
    for (const Case& c : cases) {
      if (score != RouterScore::softmax && c.experts != 7 && c.experts != 70) continue;
      SCOPED_TRACE(str("score ", static_cast<int>(score), ", experts ", c.experts));
      expect_routes_like_cpu(inputs_of(c, /*bias=*/c.experts != 7, /*valid=*/c.experts != 70), c);
    }
  }
}

TEST(CudaRouting, GroupLimitsAreThoseOfTheCpu) {
  for (const auto score : {RouterScore::softmax, RouterScore::sigmoid}) {
    const Case cases[] = {{12, 16, grouped(spec_of(3, score), 4, 2, 2), 0},
                          {6, 72, grouped(spec_of(8, score), 8, 4, 2), 0},
                          {4, 80, grouped(spec_of(2, score), 40, 3, 2), 0},
                          {5, 90, grouped(spec_of(6, score), 2, 1, 1), 5}};
    for (const Case& c : cases) {
      if (score != RouterScore::softmax && c.experts != 72) continue;
      expect_routes_like_cpu(inputs_of(c, true, true), c);
    }
  }
}

TEST(CudaRouting, EqualScoresGoToTheLowerExpertAndNanIsLowest) {
  const int64_t tokens = 9, experts = 37;
  Tensor logits = Tensor::empty({tokens, experts}, DType::f64);
  const RandomStream random(3, "ties");
  for (int64_t i = 0; i < logits.numel(); i++) {
    logits.data<double>()[i] = static_cast<double>(random.bits(static_cast<uint64_t>(i)) % 3);
    if (i < experts) logits.data<double>()[i] = 1;                       // all equal
    if (i >= 8 * experts && i % 2 == 0) logits.data<double>()[i] = NAN;  // more than half of the last token
  }
  for (const RouteSpec& spec :
       {spec_of(20, RouterScore::sigmoid, false), spec_of(5, RouterScore::softmax, false)}) {
    Case c{tokens, experts, spec, 0, 0, 0};
    const auto body = [&](const Tensors& in) {
      return Tensors{route(in[0], {}, {}, c.spec, {}).expert_ids_TK};
    };
    const NarrowLaunches narrow;
    const Tensors in = {as(logits, DType::f32)};
    EXPECT_TRUE(same_bits(device_results(in, body)[0], body(in)[0]));
  }
  const RouteSpec spec = grouped(spec_of(4, RouterScore::sigmoid), 6, 2, 2);
  const Tensors equal = {Tensor::zeros({3, 36}, DType::f32)};
  const auto body = [&](const Tensors& in) { return Tensors{route(in[0], {}, {}, spec, {}).expert_ids_TK}; };
  EXPECT_TRUE(same_bits(device_results(equal, body)[0], body(equal)[0]));
}

TEST(CudaRouting, AGivenFrequencyAndUnusedLossesAreThoseOfTheCpu) {
  const Case c{13, 33, spec_of(4, RouterScore::sqrt_softplus), 0};
  const Tensors inputs = {normal({13, 33}, 1), normal({33}, 2), normal({13, 4}, 3)};
  const auto body = [&](const Tensors& in) {
    Leaf leaf;
    leaf.grad_dtype = in[0].dtype();
    Tensor logits = in[0].clone();
    logits.grad_ref.leaf = &leaf;
    BalanceSpec balance;
    balance.aux_coeff = 2;
    balance.total_tokens = 13;
    balance.frequency_E = in[1];
    Tape tape;
    const Routed r = route(logits, {}, {}, c.spec, balance);
    EXPECT_FALSE(r.z_loss.defined());
    tape.backward(r.aux_loss);
    return Tensors{r.aux_loss.detach(), leaf.grad};
  };
  expect_like_cpu(inputs, DType::f32, body);
  expect_like_cpu(inputs, DType::f64, body);
}

TEST(CudaRouting, CountsFrequenciesAndBiasesHaveTheBitsOfTheCpu) {
  for (const int64_t experts : {1, 70, 20000}) {  // the last does not fit into shared memory
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < 600; i++) ids.push_back(i % 7 == 0 ? -1 : i * i % static_cast<int32_t>(experts));
    const auto body = [&](const Tensors& in) {
      const Device device = in[0].device();
      const Tensor counts = count_experts(in[0], experts);
      const Tensor frequency = Tensor::empty({experts}, DType::f32, device), bias = in[1].clone();
      count_frequency(device, counts, 514, frequency);
      balance_bias(device, bias, counts, 0.01);
      return Tensors{counts, frequency, bias};
    };
    const NarrowLaunches narrow;
    const Tensors inputs = {Tensor::from(ids, {200, 3}), as(normal({experts}, 1), DType::f32)};
    const Tensors got = device_results(inputs, body), want = body(inputs);
    for (size_t i = 0; i < got.size(); i++) EXPECT_TRUE(same_bits(got[i], want[i])) << experts << ' ' << i;
  }
}

}  // namespace
}  // namespace shoal::testing
