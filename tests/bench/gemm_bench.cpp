// Speed of the GEMM engines: dense products and per-expert products of a training step. Prints GF/s.
//   gemm_bench --benchmark_filter=tiled
#include <benchmark/benchmark.h>

#include <string>

#include "core/backend/cpu/gemm/engine.h"
#include "core/base/threads.h"
#include "core/ops/linear.h"
#include "core/tensor/tensor.h"

namespace shoal {
namespace {

struct Product {
  const char* op;  // NT: forward, NN: input gradient, TN: weight gradient
  int64_t m, n, k;
};

constexpr Product kDense[] = {
    {"NT", 2048, 512, 512},   {"NN", 2048, 512, 2048},  {"TN", 512, 2048, 2048}, {"NT", 2048, 1024, 1024},
    {"TN", 1024, 1024, 2048}, {"NN", 4096, 1024, 1024}, {"NT", 2048, 512, 8192},
};

template <class T>
Tensor filled(const Shape& shape) {
  std::vector<T> values(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < values.size(); i++) values[i] = static_cast<T>(0.001 * static_cast<double>(i % 997));
  return Tensor::from(values, shape);
}

benchmark::Counter gflops(benchmark::State& state, int64_t multiply_adds) {
  return {2e-9 * static_cast<double>(multiply_adds) * static_cast<double>(state.iterations()),
          benchmark::Counter::kIsRate};
}

template <class T>
void dense(benchmark::State& state, const cpu::GemmEngine* engine, Product p) {
  const bool ta = p.op[0] == 'T', tb = p.op[1] == 'T';
  const Tensor a = filled<T>(ta ? Shape{p.k, p.m} : Shape{p.m, p.k});
  const Tensor b = filled<T>(tb ? Shape{p.n, p.k} : Shape{p.k, p.n});
  const Tensor c = Tensor::zeros({p.m, p.n}, dtype_of<T>);
  cpu::GemmCall<T> call{.m = p.m, .n = p.n, .k = p.k};
  call.a = a.data<T>();
  call.lda = a.size(1);
  call.b = b.data<T>();
  call.ldb = b.size(1);
  call.c = c.data<T>();
  call.ldc = p.n;
  call.transpose_a = ta;
  call.transpose_b = tb;
  for (auto _ : state) engine->run(call);
  state.counters["GF/s"] = gflops(state, p.m * p.n * p.k);
}

/// The default engine behind the kernels; `groups` experts of p.m rows each. Argument: threads.
void kernel(benchmark::State& state, Product p, int64_t groups) {
  set_num_threads(static_cast<int>(state.range(0)));
  const std::vector<int64_t> rows(static_cast<size_t>(groups), p.m);
  const Tensor x = filled<float>({groups * p.m, p.k}), w = filled<float>({groups, p.n, p.k});
  const Tensor y = Tensor::zeros({groups * p.m, p.n}, DType::f32), dw = Tensor::zeros(w.shape(), DType::f32);
  const Tensor dx = Tensor::zeros(x.shape(), DType::f32);
  const std::string op = p.op;
  for (auto _ : state) {
    if (op == "NT") grouped_gemm_rows(Device{}, {.transpose_b = true}, x, w, y, rows);
    if (op == "NN") grouped_gemm_rows(Device{}, {}, y, w, dx, rows);
    if (op == "TN") grouped_gemm_reduce(Device{}, {.accumulate = true}, y, x, dw, rows);
  }
  state.counters["GF/s"] = gflops(state, groups * p.m * p.n * p.k);
  set_num_threads(1);
}

std::string shape_name(const Product& p) {
  return str(p.op, "/", p.m, "x", p.n, "x", p.k);
}

[[maybe_unused]] const bool registered = [] {
  for (const cpu::GemmEngine* engine : cpu::gemm_engines()) {
    for (const Product& p : kDense) {
      benchmark::RegisterBenchmark(str(engine->name(), "/f32/", shape_name(p)).c_str(),
                                   [=](benchmark::State& s) { dense<float>(s, engine, p); });
    }
    benchmark::RegisterBenchmark(str(engine->name(), "/f64/", shape_name(kDense[3])).c_str(),
                                 [=](benchmark::State& s) { dense<double>(s, engine, kDense[3]); });
  }
  for (const char* op : {"NT", "NN", "TN"}) {
    for (const int64_t tokens : {1, 32, 64, 128, 2048}) {
      const Product p{op, tokens, 1408, 512};
      const int64_t groups = tokens == 2048 ? 1 : 16;
      benchmark::RegisterBenchmark(str("kernel/", groups, "_groups/", shape_name(p)).c_str(),
                                   [=](benchmark::State& s) { kernel(s, p, groups); })
          ->Arg(1)
          ->Arg(2)
          ->UseRealTime();
    }
  }
  return true;
}();

}  // namespace
}  // namespace shoal
