// Collectives of the ranks of this host, over MPI and over shared memory, in turns:
//   mpirun -n 2 build/tests/bench/collective_bench
// GB/s: bytes of the tensor that a rank gives (all_to_all: with the rows for itself), divided by the time of
// one call, median of rounds (and the best one). The tensors are touched before; every rank has the same
// sizes. The last column is the time in which every rank copies as many bytes by memcpy, divided by that of a
// call over shared memory.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "parallel/bootstrap.h"
#include "parallel/mpi_communicator.h"
#include "parallel/shared_communicator.h"

namespace {

using namespace shoal;

constexpr int kRounds = 9;
constexpr int64_t kLargest = int64_t{64} << 20;

struct Buffers {
  Tensor in, out;
  Tensor shared;  // as gradient buckets are allocated
};
struct Group {
  std::shared_ptr<Communicator> communicator;
  Buffers buffers;
};
struct Case {
  const char* name;
  bool in_bucket;  // works on the shared tensor
  std::function<void(Communicator& group, const Buffers& buffers, int64_t count)> run;
};

Tensor filled(int64_t count) {
  return Tensor::from(std::vector<float>(static_cast<size_t>(count), 0.0F), {count});
}

std::vector<Case> cases() {
  return {
      {"memcpy", false,
       [](Communicator&, const Buffers& b, int64_t n) {
         std::memcpy(b.out.bytes(), b.in.bytes(), static_cast<size_t>(n) * sizeof(float));
       }},
      {"all_reduce", false,
       [](Communicator& g, const Buffers& b, int64_t n) {
         g.all_reduce(b.in.flat(0, n), ReduceOp::sum).wait();
       }},
      {"all_reduce bucket", true,
       [](Communicator& g, const Buffers& b, int64_t n) {
         g.all_reduce(b.shared.flat(0, n), ReduceOp::sum).wait();
       }},
      {"reduce_scatter", false,
       [](Communicator& g, const Buffers& b, int64_t n) {
         g.reduce_scatter(b.in.flat(0, n), b.out.flat(0, n / g.size()), ReduceOp::sum).wait();
       }},
      {"all_gather", false,
       [](Communicator& g, const Buffers& b, int64_t n) {
         g.all_gather(b.in.flat(0, n), b.out.flat(0, n * g.size())).wait();
       }},
      {"all_to_all", false,
       [](Communicator& g, const Buffers& b, int64_t n) {
         const std::vector<int64_t> rows(static_cast<size_t>(g.size()), n / g.size());
         g.all_to_all(b.in.flat(0, n), b.out.flat(0, n), rows, rows).wait();
       }},
      {"barrier", false, [](Communicator& g, const Buffers&, int64_t) { g.barrier(); }},
  };
}

/// Microseconds of one call, from when all ranks have written what they give.
double time_calls(const Case& one, const Group& group, int64_t count, int repeats) {
  double total = 0;
  for (int i = 0; i < repeats; i++) {
    (one.in_bucket ? group.buffers.shared : group.buffers.in).flat(0, count).set_zero();
    group.communicator->barrier();
    const auto begin = std::chrono::steady_clock::now();
    one.run(*group.communicator, group.buffers, count);
    total += std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  }
  return total / repeats;
}

double median_of(std::vector<double> us) {
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

std::string figures(std::vector<double> us, int64_t bytes) {
  std::sort(us.begin(), us.end());
  const auto rate = [&](double time) { return static_cast<double>(bytes) / time * 1e-3; };
  const double median = us[us.size() / 2];
  return fmt::format("{:>11.1f} us {:>6.2f} ({:>6.2f}) GB/s", median, rate(median), rate(us.front()));
}

void measure(const Case& one, const std::vector<Group>& groups, int64_t bytes) {
  const int repeats = static_cast<int>(std::clamp<int64_t>((int64_t{16} << 20) / bytes, 2, 200));
  std::vector<std::vector<double>> times(groups.size());
  for (int round = -1; round < kRounds; round++) {
    for (size_t g = 0; g < groups.size(); g++) {
      const double us = time_calls(one, groups[g], bytes / 4, repeats);
      if (round >= 0) times[g].push_back(us);
    }
  }
  if (groups[0].communicator->rank() != 0) return;
  static std::map<int64_t, double> copy_us;  // by bytes; the first case
  const double us = median_of(times.back());
  copy_us.try_emplace(bytes, us);
  std::string line = fmt::format("{:<18}{:>10}", one.name, bytes);
  for (const auto& values : times) line += figures(values, bytes);
  line += fmt::format("{:>8.2f}", copy_us.at(bytes) / us);
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

int run(const std::shared_ptr<Communicator>& world) {
  if (world->size() == 1) throw UsageError("collective_bench: needs ranks; start it with mpirun -n 2");
  const auto mpi = make_mpi_world(), shared = share_memory(make_mpi_world());
  if (!uses_shared_memory(*shared)) throw Error("collective_bench: the ranks cannot share memory");
  const Tensor in = filled(kLargest / 4), out = filled(kLargest / 4 * world->size());
  std::vector<Group> groups;
  for (const auto& communicator : {mpi, shared})
    groups.push_back(
        {communicator, {in, out, communicator->shared_zeros({kLargest / 4}, DType::f32, Device{})}});
  if (world->rank() == 0)
    fmt::print("{} ranks{:<10}{:>10}{:>34}{:>34}{:>8}\n", world->size(), "", "bytes", "MPI", "shared memory",
               "memcpy");
  for (const Case& one : cases()) {
    const bool sized = std::string(one.name) != "barrier";
    for (int64_t bytes = 256; bytes <= (sized ? kLargest : 256); bytes *= 4) measure(one, groups, bytes);
  }
  return 0;
}

}  // namespace

int main() {
  return shoal::run_world(run);
}
