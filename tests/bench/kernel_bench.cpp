// Every kernel of a MoE step alone, at the shapes of one layer, against the machine's limits:
//   kernel_bench [--device cpu|cuda] [--tokens 8192] [--only NAME] [--json]
//                [--bytes-per-second 4.8e12] [--bf16-flops 989e12] [--f32-flops 67e12]
// Limits that are not given are measured first. "expected" is the longer of bytes / (85 % of the memory rate)
// and FLOP / (68 % of the multiply-add rate); the first column of figures that is far below 100 % deserves a
// look. Values are random: on GPUs zeros take less power, and so less time.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/base/random.h"
#include "core/ops/activation.h"
#include "core/ops/attention.h"
#include "core/ops/bf16_linear.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/fp8_linear.h"
#include "core/ops/machine.h"
#include "core/ops/norm.h"
#include "core/ops/optimizer.h"
#include "core/ops/permute.h"
#include "core/ops/routing.h"
#include "launch/ceilings.h"

namespace shoal {
namespace {

struct Limits {
  double bytes = 0, flops_bf16 = 0, flops = 0;  // per second
};
struct Options {
  std::string device = "cpu", only;
  int64_t tokens = 8192;
  bool json = false;
  Limits limits;
};

/// Of the layer: the model of docs/cuda.md's table.
struct Sizes {
  int64_t T = 8192, D = 2048, H = 16, C = 128, S = 4096, E = 64, K = 8, F = 1024, V = 50304, P = 67 << 20;
  int64_t local_experts = 8;                         // of the E, on one of 8 ranks
  int64_t rows() const { return T * K; }             // routed, N
  int64_t width() const { return (H + 2 * H) * C; }  // of packed projections
};

class Bench {
 public:
  Bench(const Options& options, const Sizes& sizes)
      : options_(options),
        s(sizes),
        device_{options.device == "cuda" ? DeviceType::cuda : DeviceType::cpu, 0} {}
  void run();
  nlohmann::json rows = nlohmann::json::array();

 private:
  /// Elements of a fixed block of random numbers, over and over.
  Tensor random(const Shape& shape, DType dtype) const {
    constexpr int64_t kBlock = 1 << 16;
    const RandomStream stream(1, "kernel bench");
    std::vector<float> values;
    for (uint64_t i = 0; i < kBlock; i++) values.push_back(static_cast<float>(stream.normal(i)));
    const Tensor f32 = Tensor::from(values, {kBlock}, device_),
                 block = Tensor::empty({kBlock}, dtype, device_);
    cast_fwd(device_, f32, block);
    const Tensor out = Tensor::empty(shape, dtype, device_);
    for (int64_t at = 0; at < out.numel(); at += kBlock) {
      const int64_t count = std::min(kBlock, out.numel() - at);
      out.flat(at, count).copy_from(block.flat(0, count));
    }
    return out;
  }
  template <class T>
  Tensor indices(const Shape& shape, int64_t below) const {
    const RandomStream stream(2, "kernel bench");
    std::vector<T> values;
    for (uint64_t i = 0; i < static_cast<uint64_t>(shape.numel()); i++)
      values.push_back(static_cast<T>(stream.below(i, static_cast<uint64_t>(below))));
    return Tensor::from(values, shape, device_);
  }
  Tensor empty(const Shape& shape, DType dtype) const { return Tensor::empty(shape, dtype, device_); }

  template <class K, class... Args>
  void row(const std::string& shape, const K& kernel, const Args&... args) {
    measure(kernel.name(), shape, kernel.cost(args...), [&] { kernel(device_, args...); });
  }
  void measure(const std::string& name, const std::string& shape, const Cost& cost,
               const std::function<void()>& call);
  void token_rows();
  void expert_rows();
  void attention_rows();
  void product_rows();
  void fp8_rows();
  void optimizer_rows();

  const Options& options_;
  Sizes s;
  Device device_;
};

void Bench::measure(const std::string& name, const std::string& shape, const Cost& cost,
                    const std::function<void()>& call) {
  if (!options_.only.empty() && name.find(options_.only) == std::string::npos) return;
  const auto seconds = [&](int64_t count) {
    device_runtime(device_.type).synchronize();
    const double begin = now_seconds();
    for (int64_t i = 0; i < count; i++) call();
    device_runtime(device_.type).synchronize();
    return (now_seconds() - begin) / static_cast<double>(count);
  };
  seconds(1);  // first use
  const auto count = static_cast<int64_t>(std::clamp(0.02 / std::max(seconds(2), 1e-7), 1.0, 1000.0));
  const double best = std::min({seconds(count), seconds(count), seconds(count)});
  constexpr double kReachableBytes = 0.85, kReachableFlops = 0.68;
  const Limits& l = options_.limits;
  const double expected =
      std::max(cost.bytes / (kReachableBytes * l.bytes),
               cost.flops / (kReachableFlops * l.flops) + cost.flops_bf16 / (kReachableFlops * l.flops_bf16));
  rows.push_back({{"kernel", name},
                  {"shape", shape},
                  {"ms", best * 1e3},
                  {"expected_ms", expected * 1e3},
                  {"of_expected", expected / best},
                  {"gb_per_s", cost.bytes / best * 1e-9},
                  {"tflop_per_s", cost.all_flops() / best * 1e-12}});
  if (options_.json) return;
  fmt::print("{:<22}{:<34}{:>10.3f}{:>10.3f}{:>7.0f} %{:>10.0f}{:>10.2f}\n", name, shape, best * 1e3,
             expected * 1e3, 100 * expected / best, cost.bytes / best * 1e-9,
             cost.all_flops() / best * 1e-12);
  std::fflush(stdout);
}

/// What is done to each token of the residual stream, and the head.
void Bench::token_rows() {
  const std::string td = fmt::format("{} x {}", s.T, s.D);
  const Tensor x = random({s.T, s.D}, DType::bf16), y = empty({s.T, s.D}, DType::bf16);
  const Tensor residual = random({s.T, s.D}, DType::f32), sum = empty({s.T, s.D}, DType::f32),
               grad = random({s.T, s.D}, DType::f32), dx = empty({s.T, s.D}, DType::f32);
  const Tensor weight = random({s.D}, DType::f32), dweight = random({s.D}, DType::f32),
               rstd = random({s.T}, DType::f32);
  row(td, rms_norm_fwd, NormForward{x, residual, weight, {}, y, sum, {}, rstd, 1e-5});
  row(td, rms_norm_bwd, NormBackward{x, grad, residual, weight, {}, rstd, dx, y, dweight, {}});
  row(td, add_fwd, x, x, y);
  row(td, cast_fwd, residual, y);
  const Tensor ids = indices<int32_t>({s.T}, s.V);
  const Tensor table = random({s.V, s.D}, DType::f32), dtable = random({s.V, s.D}, DType::f32);
  row(td, embedding_fwd, table, ids, sum, TablePart::whole(table));
  row(td, embedding_bwd, grad, ids, dtable, TablePart::whole(dtable));
  const Tensor logits = random({s.T, s.V}, DType::f32), total = Tensor::zeros({}, DType::f64, device_);
  row(fmt::format("{} x {}", s.T, s.V), cross_entropy_fwd, CrossEntropy{logits, ids, 1.0, true, total});
}

void Bench::expert_rows() {
  const int64_t N = s.rows();
  const std::string nd = fmt::format("{} x {}", N, s.D), nf = fmt::format("{} x {}", N, s.F),
                    te = fmt::format("{} x {} experts, {} each", s.T, s.E, s.K);
  const Tensor x = random({s.T, s.D}, DType::bf16), out = empty({s.T, s.D}, DType::bf16),
               x_ND = random({N, s.D}, DType::bf16), y_ND = empty({N, s.D}, DType::bf16);
  std::vector<int64_t> row_of, choice_of, slot_of(static_cast<size_t>(N));
  for (int64_t n = 0; n < N; n++) {  // a permutation that scatters neighbours
    const int64_t slot = n * 40503 % N;
    row_of.push_back(slot / s.K);
    choice_of.push_back(slot % s.K);
    slot_of[static_cast<size_t>(slot)] = n;
  }
  const Tensor row_N = Tensor::from(row_of, {N}, device_), choice_N = Tensor::from(choice_of, {N}, device_),
               slots = Tensor::from(slot_of, {s.T, s.K}, device_);
  const Tensor weights = random({s.T, s.K}, DType::f32), dweights = empty({s.T, s.K}, DType::f32);
  row(nd, gather_rows_fwd, x, row_N, y_ND);
  row(nd, combine_rows_fwd, x_ND, weights, slots, out);
  row(nd, combine_rows_bwd, CombineBackward{x, x_ND, weights, slots, row_N, choice_N, y_ND, dweights});
  const Tensor up = random({N, 2 * s.F}, DType::bf16), dup = empty({N, 2 * s.F}, DType::bf16),
               hidden = random({N, s.F}, DType::bf16);
  row(nf, gated_activate_fwd, up, Activation::silu, hidden);
  row(nf, gated_activate_bwd, hidden, up, Activation::silu, dup);

  const Tensor logits = random({s.T, s.E}, DType::f32), scores = empty({s.T, s.E}, DType::f32),
               dlogits = empty({s.T, s.E}, DType::f32), frequency = empty({1, s.E}, DType::f32);
  RouteSpec spec;
  spec.top_k = s.K;
  BalanceSpec balance;
  balance.aux_coeff = 0.01;
  balance.total_tokens = s.T;
  RouteForward forward;
  forward.logits_TE = logits;
  forward.ids_TK = empty({s.T, s.K}, DType::i32);
  forward.weights_TK = weights;
  forward.counts_E = empty({s.E}, DType::i64);
  forward.scores_TE = scores;
  forward.frequency_GE = frequency;
  forward.aux_loss = Tensor::zeros({}, DType::f32, device_);
  forward.entropy = Tensor::zeros({}, DType::f64, device_);
  row(te, route_fwd, forward, spec, balance);
  RouteBackward backward;
  backward.dweights_TK = dweights;
  backward.ids_TK = forward.ids_TK;
  backward.weights_TK = weights;
  backward.scores_TE = scores;
  backward.frequency_GE = frequency;
  backward.logits_TE = logits;
  backward.dlogits_TE = dlogits;
  backward.daux = Tensor::from(std::vector<float>{1}, {}, device_);
  row(te, route_bwd, backward, spec, balance);
}

void Bench::attention_rows() {
  AttentionSpec spec;
  spec.seq = std::min(s.S, s.T);
  spec.batch = s.T / spec.seq;
  spec.heads = spec.kv_heads = s.H;
  spec.head_size = s.C;
  const std::string shape = fmt::format("{} x {}, {} heads of {}", spec.batch, spec.seq, s.H, s.C);
  const Tensor qkv = random({s.T, s.width()}, DType::bf16), y = empty({s.T, s.H * s.C}, DType::bf16),
               dy = random({s.T, s.H * s.C}, DType::bf16), lse = empty({s.T, s.H}, DType::f32),
               dqkv = empty({s.T, s.width()}, DType::bf16);
  row(shape, bf16_attention_fwd, qkv, spec, y, lse);
  row(shape, bf16_attention_bwd, AttentionBackward{dy, qkv, y, lse, dqkv}, spec);
  const Tensor table = rope_table({}, s.C, spec.seq, DType::f32, device_),
               positions = indices<int32_t>({s.T}, spec.seq);
  row(shape, rope_fwd, qkv, spec, RopeSpec{}, table, positions, false);
}

void Bench::product_rows() {
  const int64_t experts = s.local_experts, N = s.rows();
  const auto products = [&](int64_t groups, int64_t n, int64_t k, int64_t total, const std::string& shape) {
    const Tensor weight = random({groups, n, k}, DType::f32), dweight = random({groups, n, k}, DType::f32);
    const PackedWeight packed = packed_weight(weight);
    const Tensor x = random({total, k}, DType::bf16), y = random({total, n}, DType::bf16);
    const std::vector<int64_t> counts(static_cast<size_t>(groups), total / groups);
    const std::span<const int64_t> span(counts);
    row(shape, packed_gemm_rows, PackedUse::forward, x, packed.forward, y, span);
    row(shape, bf16_gemm_reduce, true, y, x, dweight, span);
  };
  const auto dense = [&](int64_t n, int64_t k) {
    products(1, n, k, s.T, fmt::format("{} x {} x {}", s.T, n, k));
  };
  dense(s.width(), s.D);
  dense(s.D, s.H * s.C);
  for (const auto& [n, k] : {std::pair{2 * s.F, s.D}, std::pair{s.D, s.F}})
    products(experts, n, k, N, fmt::format("{} x ({} x {} x {})", experts, N / experts, n, k));
  // Few rows per expert: launches instead of arithmetic.
  products(s.E, 2 * s.F, s.D, s.E * 32, fmt::format("{} x (32 x {} x {})", s.E, 2 * s.F, s.D));
}

/// The gate and up projection of the experts. What is expected of the products is that of bf16.
void Bench::fp8_rows() {
  const int64_t groups = s.local_experts, n = 2 * s.F, k = s.D, count = s.rows() / groups;
  const std::vector<int64_t> counts(static_cast<size_t>(groups), count), widths(counts.size(), n);
  const Tensor x = random({groups * count, k}, DType::bf16), y = empty({groups * count, n}, DType::bf16),
               weight = random({groups * n, k}, DType::f32);
  const auto e4m3 = Fp8Format::e4m3;
  for (const auto& [rows_kind, weight_kind, name] : {std::tuple{Fp8Scales::matrix, Fp8Scales::matrix, ""},
                                                     {Fp8Scales::vector, Fp8Scales::block, ", blocks"}}) {
    const std::string shape = fmt::format("{} x ({} x {} x {}){}", groups, count, n, k, name);
    const int64_t pad = rows_kind == Fp8Scales::matrix ? 16 : kFp8Block;
    const Fp8Operand a = fp8_along_rows(counts, k, e4m3, rows_kind, device_),
                     transposed = fp8_along_columns(counts, k, e4m3, rows_kind, pad, device_),
                     b = fp8_along_rows(widths, k, e4m3, weight_kind, device_);
    if (rows_kind == Fp8Scales::matrix) {
      row(shape, fp8_scales, x, std::span<const int64_t>(counts), e4m3, a.scales);
      transposed.scales.copy_from(a.scales);
      fp8_scales(device_, weight, widths, e4m3, b.scales);
    }
    fp8_quantize(device_, weight, widths, b, {});
    row(shape, fp8_quantize, x, std::span<const int64_t>(counts), a, Fp8Operand{});
    row(shape, fp8_quantize, x, std::span<const int64_t>(counts), a, transposed);
    row(shape, fp8_gemm, false, a, b, y);
  }
}

void Bench::optimizer_rows() {
  const std::string shape = fmt::format("{} parameters", s.P);
  const Tensor parameter = random({s.P}, DType::f32), grad = random({s.P}, DType::f32),
               m = Tensor::zeros({s.P}, DType::f32, device_), v = Tensor::zeros({s.P}, DType::f32, device_);
  row(shape, lion_step, LionStep{parameter, grad, m, 1e-6, 0.9, 0.99, 0.1, 1.0});
  row(shape, adamw_step, AdamwStep{parameter, grad, m, v, 1e-6, 0.9, 0.95, 1e-8, 0.1, 0.1, 0.05, 1.0});
}

void Bench::run() {
  if (!options_.json)
    fmt::print("{:<22}{:<34}{:>10}{:>10}{:>9}{:>10}{:>10}\n", "kernel", "shape", "ms", "expected", "", "GB/s",
               "TFLOP/s");
  token_rows();
  expert_rows();
  attention_rows();
  product_rows();
  fp8_rows();
  optimizer_rows();
}

void measure_missing(Limits& limits) {
  constexpr double kSeconds = 0.2;
  if (limits.flops == 0) limits.flops = measure_multiply_adds(DType::f32, kSeconds);
  if (limits.flops_bf16 == 0) limits.flops_bf16 = measure_multiply_adds(DType::bf16, kSeconds);
  if (limits.bytes == 0)
    limits.bytes = std::max(measure_memory(MemoryPattern::update, int64_t{192} << 20, kSeconds),
                            measure_memory(MemoryPattern::read, int64_t{192} << 20, kSeconds));
}

int bench_kernels(int argc, char** argv) {
  Options options;
  CLI::App app("Times every kernel of a MoE step alone");
  app.add_option("--device", options.device)->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--tokens", options.tokens, "rows; the other sizes shrink with it below 8192")
      ->check(CLI::Range(64, 1 << 20));
  app.add_option("--only", options.only, "kernels whose name has this part");
  app.add_flag("--json", options.json);
  app.add_option("--bytes-per-second", options.limits.bytes);
  app.add_option("--bf16-flops", options.limits.flops_bf16);
  app.add_option("--f32-flops", options.limits.flops);
  CLI11_PARSE(app, argc, argv);
  measure_missing(options.limits);
  Sizes sizes;
  sizes.T = options.tokens;
  if (sizes.T < 8192) {  // a layer for a smaller machine
    sizes.D = 512, sizes.H = 8, sizes.C = 64, sizes.S = std::min<int64_t>(512, sizes.T), sizes.E = 16,
    sizes.K = 2;
    sizes.F = 704, sizes.V = 8192, sizes.P = 8 << 20;
  }
  Bench bench(options, sizes);
  bench.run();
  if (options.json) {
    const nlohmann::json all = {{"device", options.device},
                                {"tokens", options.tokens},
                                {"bytes_per_second", options.limits.bytes},
                                {"bf16_flops", options.limits.flops_bf16},
                                {"f32_flops", options.limits.flops},
                                {"kernels", bench.rows}};
    std::puts(all.dump(2).c_str());
  }
  return 0;
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  try {
    return shoal::bench_kernels(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
