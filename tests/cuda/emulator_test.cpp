// The emulator itself: what it computes, and that each kind of planted bug is found.
#include <numeric>

#include "core/backend/cuda/block.h"
#include "tests/cuda/findings.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

using cuda::kAllLanes;
using cuda::LaunchShape;

Tensor counting(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0.0F);
  return Tensor::from(values, {count}, kCuda);
}

/// For EXPECT_DEATH: what the process that died has printed mentions ASan's name for such an access. No
/// regular expression: GoogleTest would compile it with Oniguruma's regcomp and run it with the C library's
/// regexec.
class ReportOfAsan final : public ::testing::MatcherInterface<const std::string&> {
 public:
  bool MatchAndExplain(const std::string& text, ::testing::MatchResultListener*) const override {
    return contains(text, "use-after-poison") || contains(text, "heap-buffer-overflow");
  }
  void DescribeTo(std::ostream* out) const override {
    *out << "is ASan's report of an access outside of memory";
  }
};
::testing::Matcher<const std::string&> report_of_asan() {
  return ::testing::Matcher<const std::string&>(new ReportOfAsan);
}

#ifdef __SANITIZE_ADDRESS__
constexpr bool kAsan = true;
#else
constexpr bool kAsan = false;
#endif

// Reverses the elements of each block through shared memory, `rounds` times.
template <bool kBarrierAfterWrite, bool kBarrierBeforeReuse>
__global__ void reverse_kernel(float* data, int rounds) {
  SHOAL_SHARED(float, tile, 64);
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  float mine = static_cast<float>(i);
  for (int round = 0; round < rounds; round++) {
    tile[threadIdx.x] = mine;
    if (kBarrierAfterWrite) __syncthreads();
    mine = tile[blockDim.x - 1 - threadIdx.x];
    if (kBarrierBeforeReuse) __syncthreads();
  }
  data[i] = mine;
}

std::vector<float> reversed_blocks(unsigned blocks, unsigned threads) {
  std::vector<float> want;
  for (unsigned b = 0; b < blocks; b++) {
    for (unsigned t = 0; t < threads; t++) want.push_back(static_cast<float>((b + 1) * threads - 1 - t));
  }
  return want;
}

TEST(EmulatorFinds, NothingInACorrectKernel) {
  const Findings found = find(reversed_blocks(5, 64), [](float* out) {
    SHOAL_LAUNCH((reverse_kernel<true, true>), shape_of(5, 64), out, 3);
  });
  EXPECT_EQ(found.fault, "");
  EXPECT_FALSE(found.wrong);
  EXPECT_EQ(found.races, 0);
}

TEST(EmulatorFinds, AMissingBarrierBetweenWriteAndRead) {
  const Findings found = find(reversed_blocks(2, 64), [](float* out) {
    SHOAL_LAUNCH((reverse_kernel<false, true>), shape_of(2, 64), out, 1);
  });
  EXPECT_TRUE(found.wrong);
  EXPECT_EQ(found.races > 0, kTsan);
}

TEST(EmulatorFinds, AMissingBarrierBeforeSharedMemoryIsUsedAgain) {
  const Findings found = find(reversed_blocks(2, 64), [](float* out) {
    SHOAL_LAUNCH((reverse_kernel<true, false>), shape_of(2, 64), out, 3);
  });
  EXPECT_TRUE(found.wrong || found.races > 0);
  EXPECT_EQ(found.races > 0, kTsan);
}

TEST(EmulatorFinds, ABarrierThatIsSkippedByItsName) {
  const auto reverse = [](float* out) {
    SHOAL_LAUNCH((reverse_kernel<true, true>), shape_of(2, 64), out, 1);
  };
  EXPECT_FALSE(find(reversed_blocks(2, 64), reverse).any());
  std::string first;
  for (const emulator::Barrier& b : emulator::barriers_seen()) {
    if (contains(b.name(), "reverse_kernel<true, true>") && first.empty()) first = b.name();
  }
  ASSERT_TRUE(contains(first, "emulator_test.cpp:")) << first;
  emulator::options().skip = first;
  const Findings found = find(reversed_blocks(2, 64), reverse);
  emulator::options().skip.clear();
  EXPECT_TRUE(found.wrong);
}

enum class Store : uint8_t { inside, past_shared, past_dynamic, past_global, before_global };

__global__ void store_kernel(float* data, Store where) {
  SHOAL_SHARED(float, tile, 32);
  SHOAL_DYNAMIC_SHARED(float, dynamic);
  const int past = threadIdx.x == 31 ? 1 : 0;
  tile[static_cast<int>(threadIdx.x) + (where == Store::past_shared ? past : 0)] = 1;
  dynamic[static_cast<int>(threadIdx.x) + (where == Store::past_dynamic ? past : 0)] = 2;
  const int i = static_cast<int>(threadIdx.x) + (where == Store::past_global ? past : 0);
  data[where == Store::before_global ? i - 1 : i] = tile[threadIdx.x] + dynamic[threadIdx.x];
}

void run_store(Store where) {
  const Tensor out = Tensor::empty({32}, DType::f32, kCuda);
  SHOAL_LAUNCH(store_kernel, shape_of(1, 32, 32 * sizeof(float)), out.data<float>(), where);
}

TEST(EmulatorFinds, StoresOutsideOfSharedAndDeviceMemory) {
  EXPECT_EQ(error_of([] { run_store(Store::inside); }), "");
  const std::pair<Store, const char*> cases[] = {
      {Store::past_shared, "written outside of tile"},
      {Store::past_dynamic, "written outside of dynamic shared memory"},
      {Store::past_global, "written after an allocation of 128 bytes"},
      {Store::before_global, "written before an allocation of 128 bytes"}};
  for (const auto& [where, message] : cases) {
    if (kAsan) {
      EXPECT_DEATH(run_store(where), report_of_asan());
    } else {
      EXPECT_TRUE(contains(error_of([&, at = where] { run_store(at); }), message)) << message;
    }
  }
}

__global__ void load_kernel(const float* data, float* out, int offset) {
  out[threadIdx.x] = data[static_cast<int>(threadIdx.x) + offset];
}

TEST(EmulatorFinds, LoadsOutsideOfDeviceMemory) {
  const Tensor data = counting(32);
  const auto run = [&](int offset) {
    const Tensor out = Tensor::empty({32}, DType::f32, kCuda);
    SHOAL_LAUNCH(load_kernel, shape_of(1, 32), data.data<float>(), out.data<float>(), offset);
    return out.to_vector<float>();
  };
  EXPECT_EQ(run(0)[31], 31);
  if (kAsan) {
    EXPECT_DEATH(run(1), report_of_asan());
  } else {
    EXPECT_TRUE(std::isnan(run(1)[31]));
    EXPECT_TRUE(std::isnan(run(-1)[0]));
  }
}

__global__ void uninitialised_kernel(float* out) {
  SHOAL_SHARED(float, tile, 32);
  out[threadIdx.x] = tile[threadIdx.x];
}

TEST(EmulatorFinds, SharedMemoryThatNobodyHasWritten) {
  const Findings found = find(std::vector<float>(32, 0.0F),
                              [](float* out) { SHOAL_LAUNCH(uninitialised_kernel, shape_of(1, 32), out); });
  EXPECT_TRUE(found.wrong);
}

enum class Divergence : uint8_t {
  two_barriers,
  early_exit,
  late_exit,
  lane_exits,
  never_together,
  wrong_mask,
  outside
};

__global__ void divergent_kernel(float* out, Divergence kind) {
  const unsigned t = threadIdx.x;
  unsigned from = t;
  if (kind == Divergence::two_barriers) {
    if (t < 32) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  }
  if (kind == Divergence::early_exit && t == 5) return;
  if (kind == Divergence::late_exit && t == 63) return;
  if (kind == Divergence::early_exit || kind == Divergence::late_exit) __syncthreads();
  if (kind == Divergence::lane_exits && t % 32 < 16) from = __shfl_xor_sync(kAllLanes, t, 16);
  if (kind == Divergence::never_together) {
    if (t == 0) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  if (kind == Divergence::wrong_mask) from = __shfl_xor_sync(t < 40 ? 0x1U : kAllLanes, t, 0);
  if (kind == Divergence::outside) from = t % 32 < 16 ? __shfl_xor_sync(0xFFFFU, t, 16) : t;
  out[t] = static_cast<float>(from);
}

TEST(EmulatorFinds, ThreadsThatPartWays) {
  const std::pair<Divergence, const char*> cases[] = {
      {Divergence::two_barriers, "divergent barrier: this thread is at"},
      {Divergence::early_exit, "divergent barrier:"},
      {Divergence::late_exit, "divergent barrier:"},
      {Divergence::lane_exits, "__shfl_xor_sync"},
      {Divergence::never_together, "all threads wait for ever:"},
      {Divergence::wrong_mask, "is not in mask"},
      {Divergence::outside, "reads a lane that is not in its mask"}};
  const std::vector<float> want(64, 0.0F);
  for (const auto& [kind, message] : cases) {
    const Findings found =
        find(want, [kind = kind](float* out) { SHOAL_LAUNCH(divergent_kernel, shape_of(1, 64), out, kind); });
    EXPECT_TRUE(contains(found.fault, message)) << message << " is not in: " << found.fault;
    EXPECT_TRUE(contains(found.fault, "kernel divergent_kernel")) << found.fault;
  }
}

// Counts values: by atomics or not.
template <bool kAtomic>
__global__ void histogram_kernel(float* counts, int num_bins) {
  SHOAL_SHARED(int, bins, 4);
  if (threadIdx.x < 4) bins[threadIdx.x] = 0;
  __syncthreads();
  const unsigned bin = threadIdx.x % static_cast<unsigned>(num_bins);
  if (kAtomic) {
    atomicAdd(&bins[bin], 1);
  } else {
    bins[bin] += 1;
  }
  __syncthreads();
  if (threadIdx.x < 4) counts[threadIdx.x] = static_cast<float>(bins[threadIdx.x]);
}

TEST(EmulatorFinds, AHistogramWithoutAtomics) {
  const std::vector<float> want(4, 16.0F);
  EXPECT_FALSE(
      find(want, [](float* out) { SHOAL_LAUNCH((histogram_kernel<true>), shape_of(1, 64), out, 4); }).any());
  const Findings found =
      find(want, [](float* out) { SHOAL_LAUNCH((histogram_kernel<false>), shape_of(1, 64), out, 4); });
  EXPECT_EQ(found.races > 0,
            kTsan);  // values happen to be right: a fiber is not stopped between load and store
}

__global__ void add_to_row_kernel(float* row, int first) {
  if (static_cast<int>(blockIdx.x) == first) row[threadIdx.x] = 0;
  row[threadIdx.x] += 1;
}

TEST(EmulatorFinds, BlocksThatWriteToTheSameRow) {
  const Findings found = find(std::vector<float>(32, 3.0F),
                              [](float* out) { SHOAL_LAUNCH(add_to_row_kernel, shape_of(3, 32), out, 0); });
  EXPECT_TRUE(found.wrong);
  EXPECT_EQ(found.races > 0, kTsan);
}

// Lanes of a warp hand values on through shared memory.
template <bool kSync>
__global__ void warp_kernel(float* out) {
  SHOAL_SHARED(float, tile, 32);
  tile[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (kSync) __syncwarp();
  out[threadIdx.x] = tile[31 - threadIdx.x];
}

TEST(EmulatorFinds, AWarpThatIsThoughtToRunInStep) {
  const auto want = reversed_blocks(1, 32);
  EXPECT_FALSE(find(want, [](float* out) { SHOAL_LAUNCH((warp_kernel<true>), shape_of(1, 32), out); }).any());
  const Findings found =
      find(want, [](float* out) { SHOAL_LAUNCH((warp_kernel<false>), shape_of(1, 32), out); });
  EXPECT_TRUE(found.wrong);
  EXPECT_EQ(found.races > 0, kTsan);
}

__global__ void cursor_kernel(float* order, int* cursor) {
  order[atomicAdd(cursor, 1)] = static_cast<float>(blockIdx.x * blockDim.x + threadIdx.x);
}

TEST(EmulatorFinds, ResultsThatDependOnTheSchedule) {
  std::vector<std::vector<float>> orders;
  for_each_schedule([&](const std::string&) {
    const Tensor out = Tensor::empty({128}, DType::f32, kCuda);
    const Tensor cursor = Tensor::zeros({1}, DType::i32, kCuda);
    SHOAL_LAUNCH(cursor_kernel, shape_of(4, 32), out.data<float>(), cursor.data<int32_t>());
    orders.push_back(out.to_vector<float>());
  });
  for (size_t i = 0; i < orders.size(); i++) {
    for (size_t j = 0; j < i; j++) EXPECT_NE(orders[i], orders[j]) << i << " and " << j;
    std::sort(orders[i].begin(), orders[i].end());
    EXPECT_EQ(orders[i], counting(128).to_vector<float>());
  }
}

__global__ void large_shared_kernel(float* out) {
  SHOAL_SHARED(float, tile, 12289);
  tile[threadIdx.x] = 1;
  out[threadIdx.x] = tile[threadIdx.x];
}

TEST(EmulatorFinds, SizesThatTheHardwareDoesNotHave) {
  const Tensor out = Tensor::empty({2048}, DType::f32, kCuda);
  const auto store = [&](LaunchShape shape) {
    return error_of([&] { SHOAL_LAUNCH(store_kernel, shape, out.data<float>(), Store::inside); });
  };
  EXPECT_TRUE(contains(store(shape_of(1, 48, 192)), "expected blocks of whole warps"));
  EXPECT_TRUE(contains(store(shape_of(1, 1056, 192)), "at most 1024 threads"));
  EXPECT_TRUE(contains(store(shape_of(1, 32, 227 * 1024 + 1)), "at most 232448 bytes of shared memory"));
  EXPECT_TRUE(contains(store({1, 65536, 32, 192, nullptr}), "expected a grid of"));
  EXPECT_TRUE(contains(store(shape_of(1, 32, 227 * 1024)), "of shared memory, got 232576 with tile"));
  EXPECT_TRUE(
      contains(error_of([&] { SHOAL_LAUNCH(large_shared_kernel, shape_of(1, 32), out.data<float>()); }),
               "at most 49152 bytes of static shared memory, got 49156 with tile"));
}

__global__ void functions_kernel(float* out) {
  const unsigned t = threadIdx.x;
  float* mine = out + t * 12;
  mine[0] = static_cast<float>(__shfl_sync(kAllLanes, t, 3));
  mine[1] = static_cast<float>(__shfl_down_sync(kAllLanes, t, 2));
  mine[2] = static_cast<float>(__shfl_up_sync(kAllLanes, t, 2));
  mine[3] = static_cast<float>(__shfl_xor_sync(kAllLanes, t, 5));
  mine[4] = static_cast<float>(__popc(__ballot_sync(kAllLanes, t % 3 == 0 ? 1 : 0)));
  mine[5] = static_cast<float>(__any_sync(kAllLanes, t == 40 ? 1 : 0));
  mine[6] = static_cast<float>(__all_sync(kAllLanes, t >= 32 ? 1 : 0));
  mine[7] = static_cast<float>(__syncthreads_count(t % 4 == 1 ? 1 : 0));
  mine[8] = static_cast<float>(__syncthreads_or(t == 7 ? 1 : 0) * 10 + __syncthreads_and(t == 7 ? 1 : 0));
  mine[9] = static_cast<float>(__ffs(t << 3));
  const unsigned same = __match_any_sync(kAllLanes, static_cast<int>(t * t % 5));
  mine[11] = static_cast<float>(__popc(same & ((1U << t % 32) - 1)));
  mine[10] = t % 32 < 8 ? static_cast<float>(__shfl_xor_sync(0xFFU, t, 7)) : -1.0F;
}

TEST(Emulator, WarpAndBlockFunctionsDoWhatCudaSays) {
  std::vector<float> want;
  for (int t = 0; t < 64; t++) {
    const int lane = t % 32, warp = t - lane;
    int same = 0;
    for (int before = warp; before < t; before++) same += before * before % 5 == t * t % 5 ? 1 : 0;
    want.insert(want.end(),
                {static_cast<float>(warp + 3), static_cast<float>(lane < 30 ? t + 2 : t),
                 static_cast<float>(lane >= 2 ? t - 2 : t), static_cast<float>(warp + (lane ^ 5)),
                 warp == 0 ? 11.0F : 11.0F, warp == 0 ? 0.0F : 1.0F, warp == 0 ? 0.0F : 1.0F, 16.0F, 10.0F,
                 static_cast<float>(t == 0 ? 0 : __builtin_ctz(static_cast<unsigned>(t)) + 4),
                 lane < 8 ? static_cast<float>(warp + (lane ^ 7)) : -1.0F, static_cast<float>(same)});
  }
  const Findings found = find(want, [](float* out) { SHOAL_LAUNCH(functions_kernel, shape_of(1, 64), out); });
  EXPECT_EQ(found.fault, "");
  EXPECT_FALSE(found.wrong);
  EXPECT_EQ(found.races, 0);
}

__global__ void index_kernel(float* out) {
  const unsigned i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  out[i] = static_cast<float>(i) + (threadIdx.y + threadIdx.z + blockIdx.z == 0 ? 0 : 0.5F);
}

TEST(Emulator, EveryThreadOfAGridRunsOnce) {
  const auto before = emulator::counts();
  const Findings found = find(counting(2 * 3 * 32).to_vector<float>(), [](float* out) {
    SHOAL_LAUNCH(index_kernel, (LaunchShape{2, 3, 32, 0, nullptr}), out);
  });
  EXPECT_FALSE(found.any());
  EXPECT_EQ(emulator::counts().blocks - before.blocks, 6 * std::size(kSchedules));
  EXPECT_EQ(emulator::counts().threads - before.threads, 192 * std::size(kSchedules));
}

TEST(Emulator, GoesOnAfterAFault) {
  const Tensor out = Tensor::empty({64}, DType::f32, kCuda);
  EXPECT_NE(error_of([&] {
              SHOAL_LAUNCH(divergent_kernel, shape_of(1, 64), out.data<float>(), Divergence::two_barriers);
            }),
            "");
  SHOAL_LAUNCH((reverse_kernel<true, true>), shape_of(1, 64), out.data<float>(), 1);
  EXPECT_EQ(out.to_vector<float>(), reversed_blocks(1, 64));
}

}  // namespace
}  // namespace shoal::testing
