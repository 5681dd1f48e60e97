// Attention of context parallel ranks, forward and backward: keys and values all at once (parallel.context:
// all_gather) and from neighbour to neighbour (ring), in turns, and the same rows in one rank's attention:
//   mpirun -n 2 build/tests/bench/context_bench
// Median in ms, and the median of the ratios ring / all_gather of the same round; one thread per rank.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "core/autograd/tape.h"
#include "core/base/random.h"
#include "core/base/threads.h"
#include "core/ops/elementwise.h"
#include "parallel/bootstrap.h"
#include "parallel/context_attention.h"

namespace {

using namespace shoal;

constexpr int kRounds = 11;

Tensor random_rows(int64_t rows, int64_t width, DType dtype) {
  const RandomStream random(5, "bench");
  std::vector<float> values(static_cast<size_t>(rows * width));
  for (size_t i = 0; i < values.size(); i++) values[i] = static_cast<float>(random.normal(i));
  const Tensor x = Tensor::from(values, Shape{rows, width});
  return dtype == DType::bf16 ? cast(x, dtype) : x;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure(Communicator& world, int64_t seq, DType dtype) {
  AttentionSpec spec;
  spec.seq = seq;
  spec.heads = 8;
  spec.kv_heads = 4;
  spec.head_size = 64;
  const ContextKind kinds[] = {ContextKind::all_gather, ContextKind::ring};
  const ContextSplit split(world, kinds[0]);
  Tensor qkv = random_rows(split.own(seq).rows(), (spec.heads + 2 * spec.kv_heads) * spec.head_size, dtype);
  Leaf leaf;
  qkv.grad_ref.leaf = &leaf;
  std::vector<double> times[2], ratios;
  for (int round = -1; round < kRounds; round++) {
    double ms[2];
    for (size_t i = 0; i < 2; i++) {
      world.barrier();
      const auto begin = std::chrono::steady_clock::now();
      Tape tape;
      const Tensor y = context_attention(qkv, spec, ContextSplit(world, kinds[i]));
      tape.backward({y}, {y});
      ms[i] = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    }
    if (round < 0) continue;
    for (size_t i = 0; i < 2; i++) times[i].push_back(ms[i]);
    ratios.push_back(ms[1] / ms[0]);
  }
  if (world.rank() != 0) return;
  fmt::print("{} tokens, {}: all_gather {:.1f} ms, ring {:.1f} ms, ratio {:.3f}\n", seq, dtype_name(dtype),
             median(times[0]), median(times[1]), median(ratios));
}

int run(const std::shared_ptr<Communicator>& world) {
  if (world->size() == 1) throw UsageError("context_bench: needs ranks; start it with mpirun -n 2");
  set_num_threads(1);
  for (const int64_t seq : {1024, 4096}) {
    for (const DType dtype : {DType::f32, DType::bf16}) measure(*world, seq, dtype);
  }
  return 0;
}

}  // namespace

int main() {
  return shoal::run_world(run);
}
