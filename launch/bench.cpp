#include "launch/bench.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/base/threads.h"
#include "core/ops/bf16_linear.h"
#include "core/ops/linear.h"
#include "optim/optimizer.h"

namespace shoal {

namespace {

/// Rows of work per second; measured on one thread of rank 0 and on everything.
class Machine {
 public:
  Machine(const BenchOptions& options, Communicator& world, BenchReport& report)
      : options_(options), world_(world), report_(report) {}

  /// rate() gives work per second on the calling rank's team.
  void row(const std::string& group, const std::string& name, const std::function<double()>& rate) {
    BenchRow row{group, name, 0, 0};
    const int threads = num_threads();
    const bool alone = world_.size() == 1 && threads == 1;
    double one = 0;
    if (world_.rank() == 0 && !alone) {
      set_num_threads(1);
      one = rate();
      set_num_threads(threads);
    }
    world_.barrier();
    row.all = world_.sum(rate()) * 1e-9;
    row.one_thread = alone ? row.all : world_.sum(one) * 1e-9;
    report_.rows.push_back(row);
  }
  /// The same for a kernel call, whose work is its cost's.
  template <class K, class... Args>
  void kernel_row(const std::string& group, const std::string& name, const K& kernel, const Args&... args) {
    const Cost cost = kernel.cost(args...);
    const double work = cost.all_flops() > 0 ? cost.all_flops() : cost.bytes;
    row(group, name, [&] {
      return best_rate(options_.seconds, [&] {
        kernel(Device{}, args...);
        return work;
      });
    });
  }

  void products(DType dtype);
  void memory();

 private:
  void f32_products(DType dtype, const std::string& group, int64_t groups, const std::vector<int64_t>& rows,
                    int64_t n, int64_t k, const std::string& what);
  void bf16_products(int64_t groups, const std::vector<int64_t>& rows, int64_t n, int64_t k,
                     const std::string& what);
  const BenchOptions& options_;
  Communicator& world_;
  BenchReport& report_;
};

// One group is a dense layer. The products of y (forward), dx and dweight, which is added to what other
// micro-batches left or, by the first of a step, written.
void Machine::f32_products(DType dtype, const std::string& group, int64_t groups,
                           const std::vector<int64_t>& rows, int64_t n, int64_t k, const std::string& what) {
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const Tensor x = Tensor::zeros({total, k}, dtype), y = Tensor::zeros({total, n}, dtype);
  const Tensor w = Tensor::zeros({groups, n, k}, dtype), dw = Tensor::zeros({groups, n, k}, dtype);
  const Gemm forward{.transpose_b = true}, back{}, weight{.transpose_a = true, .accumulate = true},
      written{.transpose_a = true};
  if (groups == 1) {
    const Tensor w2 = w.view({n, k}), dw2 = dw.view({n, k});
    kernel_row(group, what + ", y", gemm, forward, x, w2, y);
    kernel_row(group, what + ", dx", gemm, back, y, w2, x);
    kernel_row(group, what + ", dweight +=", gemm, weight, y, x, dw2);
    kernel_row(group, what + ", dweight =", gemm, written, y, x, dw2);
    return;
  }
  const std::span<const int64_t> span(rows);
  kernel_row(group, what + ", y", grouped_gemm_rows, forward, x, w, y, span);
  kernel_row(group, what + ", dx", grouped_gemm_rows, back, y, w, x, span);
  kernel_row(group, what + ", dweight +=", grouped_gemm_reduce, Gemm{.accumulate = true}, y, x, dw, span);
  kernel_row(group, what + ", dweight =", grouped_gemm_reduce, Gemm{}, y, x, dw, span);
}

void Machine::bf16_products(int64_t groups, const std::vector<int64_t>& rows, int64_t n, int64_t k,
                            const std::string& what) {
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const Tensor x = Tensor::zeros({total, k}, DType::bf16), y = Tensor::zeros({total, n}, DType::bf16);
  const Tensor w = Tensor::zeros({groups, n, k}, DType::f32), dw = Tensor::zeros({groups, n, k}, DType::f32);
  const PackedWeight packed = packed_weight(w);
  const std::span<const int64_t> span(rows);
  kernel_row("bf16", what + ", y", packed_gemm_rows, PackedUse::forward, x, packed.forward, y, span);
  kernel_row("bf16", what + ", dx", packed_gemm_rows, PackedUse::backward, y, packed.backward, x, span);
  kernel_row("bf16", what + ", dweight +=", bf16_gemm_reduce, true, y, x, dw, span);
  kernel_row("bf16", what + ", dweight =", bf16_gemm_reduce, false, y, x, dw, span);
}

void Machine::products(DType dtype) {
  const std::string group = dtype == DType::bf16 ? "bf16" : dtype == DType::f64 ? "f64" : "f32";
  row(group, "multiply-adds in registers", [&] { return measure_multiply_adds(dtype, options_.seconds); });
  row(group, "512 x 512 x 512 (MFU's peak)", [&] { return measure_gemm(Device{}, dtype, options_.seconds); });
  const int64_t T = options_.tokens, experts = 16, per_expert = std::max<int64_t>(1, T / 32);
  const std::vector<int64_t> dense = {T}, grouped(static_cast<size_t>(experts), per_expert);
  const std::string layer = str(T, " tokens, 512 -> 2048"),
                    moe = str(experts, " experts x ", per_expert, " tokens, 512 -> 1408");
  if (dtype == DType::bf16) {
    bf16_products(1, dense, 2048, 512, layer);
    bf16_products(experts, grouped, 1408, 512, moe);
  } else {
    f32_products(dtype, group, 1, dense, 2048, 512, layer);
    f32_products(dtype, group, experts, grouped, 1408, 512, moe);
  }
}

void Machine::memory() {
  const std::pair<const char*, MemoryPattern> patterns[] = {{"update, a = f a", MemoryPattern::update},
                                                            {"read", MemoryPattern::read},
                                                            {"copy", MemoryPattern::copy},
                                                            {"triad, a = b + f c", MemoryPattern::triad}};
  for (const auto& [name, pattern] : patterns) {
    row("memory", name, [&] { return measure_memory(pattern, options_.memory, options_.seconds); });
  }
  constexpr double kBytesPerParameter = 28;
  Parameter parameter;
  parameter.value = Tensor::zeros({options_.parameters}, DType::f32);
  parameter.leaf.grad = Tensor::zeros({options_.parameters}, DType::f32);
  const auto adamw = OptimizerRegistry::make(Choice{"adamw", nullptr}, {&parameter});
  row("memory", "adamw, 28 bytes per parameter", [&] {
    return best_rate(options_.seconds, [&] {
      adamw->step(1e-3, 1);
      return kBytesPerParameter * static_cast<double>(options_.parameters);
    });
  });
}

/// Seconds of one call: the mean over as many as fit the time, the same number on every rank.
double seconds_per_call(double seconds, Communicator& world, const std::function<void()>& call) {
  const auto run = [&](int64_t count) {
    world.barrier();
    const double begin = now_seconds();
    for (int64_t i = 0; i < count; i++) call();
    return (now_seconds() - begin) / static_cast<double>(count);
  };
  const double first = run(2);
  const auto count = static_cast<int64_t>(std::clamp(seconds / std::max(first, 1e-7), 2.0, 1e5));
  return run(world.min(count));
}

std::vector<CollectiveRow> bench_collectives(const BenchOptions& options, Communicator& world) {
  std::vector<CollectiveRow> rows;
  const int64_t ranks = world.size();
  for (const int64_t bytes : options.message_bytes) {
    const int64_t per_rank = std::max<int64_t>(1, bytes / 4 / ranks);
    const Tensor whole = Tensor::zeros({per_rank * ranks}, DType::f32),
                 part = Tensor::zeros({per_rank}, DType::f32);
    const Tensor other = Tensor::zeros({per_rank * ranks}, DType::f32);
    const std::vector<int64_t> counts(static_cast<size_t>(ranks), per_rank);
    const auto add = [&](const char* name, const std::function<void()>& call) {
      rows.push_back({name, whole.num_bytes(), seconds_per_call(options.seconds, world, call)});
    };
    add("all_reduce", [&] { world.all_reduce(whole, ReduceOp::sum).wait(); });
    add("all_gather", [&] { world.all_gather(part, whole).wait(); });
    add("reduce_scatter", [&] { world.reduce_scatter(whole, part, ReduceOp::sum).wait(); });
    add("all_to_all", [&] { world.all_to_all(whole, other, counts, counts).wait(); });
  }
  return rows;
}

}  // namespace

BenchReport bench_machine(const BenchOptions& options, Communicator& world) {
  BenchReport report;
  report.ranks = world.size();
  report.threads = num_threads();
  Machine machine(options, world, report);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) machine.products(dtype);
  machine.memory();
  if (world.size() > 1) report.collectives = bench_collectives(options, world);
  return report;
}

}  // namespace shoal
