#include "core/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/ops/elementwise.h"
#include "tests/cuda/attention_calls.h"

namespace shoal::testing {
namespace {

/// Ragged against tiles of 16, 32 and 64 rows, head sizes that fill no vector, groups, all masks, and
/// nothing.
std::vector<AttentionSpec> tile_cases() {
  std::vector<AttentionSpec> cases = {
      make_spec(1, 1, 1, 1, 1),    make_spec(2, 37, 4, 2, 16),        make_spec(1, 70, 3, 1, 20),
      make_spec(1, 97, 2, 1, 64),  make_spec(1, 65, 2, 2, 80),        make_spec(2, 67, 2, 1, 24, false),
      make_spec(1, 70, 1, 1, 136), make_spec(0, 5, 2, 1, 4),          make_spec(1, 0, 2, 1, 4),
      make_spec(1, 9, 2, 1, 264),  make_spec(1, 37, 2, 1, 256, false)};
  for (const bool causal : {true, false}) {
    AttentionSpec packed = make_spec(2, 150, 2, 1, 16, causal);
    packed.document_BS = documents(2, {1, 66, 40, 3, 40});
    packed.alibi_slopes_H = Tensor::from(alibi_slopes(2), {2});
    packed.scale = 0.3;
    cases.push_back(packed);
  }
  return cases;
}

/// The same for kernels that take 32 rows at a time.
std::vector<AttentionSpec> row_cases() {
  std::vector<AttentionSpec> cases = {make_spec(1, 1, 1, 1, 1),   make_spec(2, 9, 6, 2, 16),
                                      make_spec(1, 35, 1, 1, 20), make_spec(1, 34, 2, 1, 7, false),
                                      make_spec(0, 5, 2, 1, 4),   make_spec(1, 0, 2, 1, 4),
                                      make_spec(1, 5, 2, 1, 301)};
  for (const bool causal : {true, false}) {
    AttentionSpec packed = make_spec(2, 45, 2, 1, 4, causal);
    packed.document_BS = documents(2, {1, 36, 3, 5});
    packed.alibi_slopes_H = Tensor::from(alibi_slopes(2), {2});
    packed.scale = 0.3;
    cases.push_back(packed);
  }
  return cases;
}

void expect_forward_like_cpu(const AttentionSpec& spec, DType dtype) {
  expect_like_cpu({normal(packed_shape(spec), 1)}, dtype,
                  [&](const Tensors& in) { return forward(in[0], spec); });
}

TEST(CudaAttention, ForwardIsTheCpusForAllMasksAndSizes) {
  for (const AttentionSpec& spec : row_cases()) {
    for (const DType dtype : {DType::f32, DType::f64}) expect_forward_like_cpu(spec, dtype);
  }
}

TEST(CudaBf16Attention, ForwardIsTheCpusForAllMasksAndSizes) {
  for (const AttentionSpec& spec : tile_cases()) expect_forward_like_cpu(spec, DType::bf16);
}

void expect_backward_like_cpu(const AttentionSpec& spec, DType dtype) {
  const Shape output{spec.batch * spec.seq, spec.heads * spec.head_size};
  Tolerance tolerance = tolerance_of(dtype);
  if (dtype == DType::bf16) tolerance = {2e-2, 3e-2};
  if (dtype == DType::f32) tolerance.absolute = 1e-5;
  expect_like_cpu(
      {normal(packed_shape(spec), 1), normal(output, 2)}, dtype,
      [&](const Tensors& in) { return backward(in[0], in[1], spec); }, tolerance);
}

TEST(CudaAttentionBackward, GradientIsTheCpusForAllMasksAndSizes) {
  for (const AttentionSpec& spec : row_cases()) {
    for (const DType dtype : {DType::f32, DType::f64}) expect_backward_like_cpu(spec, dtype);
  }
}

TEST(CudaBf16AttentionBackward, GradientIsTheCpusForAllMasksAndSizes) {
  for (const AttentionSpec& spec : tile_cases()) expect_backward_like_cpu(spec, DType::bf16);
}

/// Small ones, as the emulator is slow.
std::vector<PartCase> small_parts() {
  std::vector<PartCase> cases = {{make_spec(2, 9, 4, 2, 5), {{{0, 7}, {2, 2}}, {{2, 5}, {2, 2}}}},
                                 {make_spec(1, 5, 2, 1, 4), {{{0, 3}, {0, 0}}, {{0, 3}, {2, 1}}}}};
  for (const bool causal : {true, false}) {
    PartCase p{make_spec(1, 80, 2, 1, 8, causal), {{{5, 50}, {12, 20}}, {{0, 41}, {20, 39}}}};
    cases.push_back(p);
    p.spec.document_BS = documents(1, {20, 36, 14, 10});
    p.spec.alibi_slopes_H = Tensor::from(alibi_slopes(2), {2});
    cases.push_back(p);
  }
  return cases;
}

TEST(CudaAttentionPart, ResultsAndGradientsAreTheCpus) {
  for (const PartCase& p : small_parts()) {
    const Shape output{p.spec.batch * p.part.queries.rows(), p.spec.heads * p.spec.head_size};
    for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
      expect_like_cpu({normal(p.qkv_shape(), 1), normal(p.kv_shape(), 2)}, dtype,
                      [&](const Tensors& in) { return Tensors{part_forward(in[0], in[1], p)[0]}; });
      Tolerance tolerance = tolerance_of(dtype);
      if (dtype == DType::bf16) tolerance = {2e-2, 3e-2};
      if (dtype == DType::f32) tolerance.absolute = 1e-5;
      expect_like_cpu(
          {normal(p.qkv_shape(), 1), normal(p.kv_shape(), 2), normal(output, 3)}, dtype,
          [&](const Tensors& in) { return part_backward(in[0], in[1], in[2], p); }, tolerance);
    }
  }
}

TEST(CudaAttentionPart, PartsMergeAsOnTheCpu) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    expect_like_cpu({normal({7, 20}, 1), normal({7, 20}, 2), normal({7, 4}, 3), normal({7, 4}, 4)}, dtype,
                    [&](const Tensors& in) {
                      const DType sums = stats_dtype(in[0].dtype());
                      const auto wide = [&](const Tensor& x) {
                        return x.dtype() == sums ? x.clone() : cast(x, sums);
                      };
                      const Tensor sum = wide(in[0]), lse = wide(in[2]);
                      merge_attention(in[0].device(), {in[1], wide(in[3]), sum, lse});
                      return Tensors{sum, lse};
                    });
  }
}

TEST(CudaAttentionBackward, AGradientOfAnotherShapeIsAnError) {
  const AttentionSpec spec = make_spec(1, 2, 1, 1, 8);
  const Tensor qkv = as(normal(packed_shape(spec), 1), DType::f32).to(kCuda);
  EXPECT_NE(error_of([&] {
              backward(qkv, Tensor::empty({2, 7}, DType::f32, kCuda), spec);
            }).find("attention_bwd: expected dy like y, [2, 8] f32, got [2, 7] f32"),
            std::string::npos);
}

/// 1 where NaN is.
std::vector<double> not_a_number(const Tensor& t) {
  std::vector<double> out;
  for (const double v : to_doubles(t)) out.push_back(std::isnan(v) ? 1 : 0);
  return out;
}

void expect_nan_where_a_query_sees_it(DType dtype) {
  const AttentionSpec spec = make_spec(1, 150, 2, 1, 16);
  const Tensor qkv = normal(packed_shape(spec), 3);
  for (const double bad : {std::nan(""), HUGE_VAL}) {
    const Tensor with = qkv.clone();
    with.data<double>()[(100 * 4 + 2) * 16 + 5] = bad;  // of key 100
    const Tensor rounded = as(with, dtype);
    const NarrowLaunches narrow;
    const auto got = not_a_number(forward(rounded.to(kCuda), spec)[0].to(kCpu));
    EXPECT_EQ(got, not_a_number(forward(rounded, spec)[0])) << dtype << ' ' << bad;
    EXPECT_GT(std::count(got.begin(), got.end(), 1), 0);
    EXPECT_EQ(std::count(got.begin(), got.begin() + 100 * 32, 1), 0);
  }
}

TEST(CudaBf16Attention, NanAndInfinityOfAKeyReachTheQueriesThatSeeIt) {
  expect_nan_where_a_query_sees_it(DType::bf16);
}

TEST(CudaAttention, NanAndInfinityOfAKeyReachTheQueriesThatSeeIt) {
  expect_nan_where_a_query_sees_it(DType::f32);
}

struct Decoding {
  int64_t batch, heads, kv_heads, head_size;
  int64_t given;               // tokens that the caches hold at first
  std::vector<int64_t> steps;  // new tokens of each call
  bool alibi;

  int64_t num_new() const { return std::accumulate(steps.begin(), steps.end(), int64_t{0}); }
  Shape cache() const { return {batch, given + num_new(), kv_heads, head_size}; }
};

/// inputs: new packed rows, step after step; caches, of which only the given tokens count. Every y, and both
/// caches.
Tensors decode(const Tensors& inputs, const Decoding& steps) {
  const Device device = inputs[0].device();
  AttentionSpec spec = make_spec(steps.batch, 0, steps.heads, steps.kv_heads, steps.head_size);
  if (steps.alibi) spec.alibi_slopes_H = Tensor::from(alibi_slopes(steps.heads), {steps.heads}, device);
  const bool empty = steps.given == 0;  // caches are then poison on the device
  DecodeArgs args;
  args.cache_k = empty ? Tensor::empty(steps.cache(), inputs[0].dtype(), device) : inputs[1].clone();
  args.cache_v = empty ? Tensor::empty(steps.cache(), inputs[0].dtype(), device) : inputs[2].clone();
  args.length = steps.given;
  const auto& kernel = inputs[0].dtype() == DType::bf16 ? bf16_attention_decode : attention_decode;
  Tensors results;
  for (const int64_t step : steps.steps) {
    spec.seq = step;
    const int64_t first = (args.length - steps.given) * steps.batch;
    args.qkv = inputs[0].rows(first, first + step * steps.batch).clone();
    args.y = Tensor::empty({spec.batch * step, spec.heads * spec.head_size}, args.qkv.dtype(), device);
    kernel(device, args, spec);
    results.push_back(args.y);
    args.length += step;
  }
  results.push_back(args.cache_k);
  results.push_back(args.cache_v);
  return results;
}

void expect_decoding_like_cpu(DType dtype) {
  const Decoding cases[] = {{2, 4, 2, 16, 0, {18, 1, 3, 17, 1}, true},
                            {2, 1, 1, 8, 250, {1, 6, 1}, false},  // more keys than a part of them has
                            {1, 2, 1, 20, 0, {1, 1, 17}, false},
                            {1, 2, 2, 300, 0, {16, 1}, false}};
  for (const Decoding& c : cases) {
    const Shape packed = packed_shape(make_spec(c.batch, c.num_new(), c.heads, c.kv_heads, c.head_size));
    expect_like_cpu({normal(packed, 5), normal(c.cache(), 6), normal(c.cache(), 7)}, dtype,
                    [&](const Tensors& in) { return decode(in, c); });
  }
}

TEST(CudaAttention, DecodingIsTheCpus) {
  for (const DType dtype : {DType::f32, DType::f64}) expect_decoding_like_cpu(dtype);
}

TEST(CudaBf16Attention, DecodingIsTheCpus) {
  expect_decoding_like_cpu(DType::bf16);
}

TEST(CudaAttention, DecodingBeyondTheCachesIsAnError) {
  const AttentionSpec spec = make_spec(1, 2, 1, 1, 8);
  DecodeArgs args;
  args.qkv = as(normal(packed_shape(spec), 1), DType::f32).to(kCuda);
  args.cache_k = args.cache_v = Tensor::empty({1, 3, 1, 8}, DType::f32, kCuda);
  args.y = Tensor::empty({2, 8}, DType::f32, kCuda);
  args.length = 2;
  EXPECT_NE(error_of([&] {
              attention_decode(kCuda, args, spec);
            }).find("2 new tokens after 2 do not fit the cache capacity 3"),
            std::string::npos);
  args.cache_v = Tensor::empty({1, 4, 1, 8}, DType::f32, kCuda);
  EXPECT_NE(
      error_of([&] { attention_decode(kCuda, args, spec); }).find("expected caches [B, capacity, G, C]"),
      std::string::npos);
}

}  // namespace
}  // namespace shoal::testing
