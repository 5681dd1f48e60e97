// The functions of core/backend/cuda/ptx.h: that the emulator does what the PTX ISA says, and that it finds
// the bugs that each makes possible.
#include "core/backend/cuda/ptx.h"

#include <cmath>
#include <limits>

#include "core/backend/cuda/block.h"
#include "tests/cuda/findings.h"

namespace shoal::testing {
namespace {

using namespace cuda;

// The layouts below are written element by element, as the PTX ISA lists them for mma.m16n8k16 of bf16.

SHOAL_DEVICE uint32_t pair_of(float low, float high) {
  return uint32_t{BFloat16(low).bits} | uint32_t{BFloat16(high).bits} << 16;
}

// d = c + a b; a [16, 16], b [16, 8], c and d [16, 8] in f32, by rows.
__global__ void product_kernel(const float* a, const float* b, const float* c, float* d) {
  const unsigned group = threadIdx.x / 4, thread = threadIdx.x % 4;
  float elements[8], sums[4];
  uint32_t rows[4], columns[2];
  for (unsigned i = 0; i < 8; i++) {
    const unsigned row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
    elements[i] = a[row * 16 + thread * 2 + (i & 1) + (i >= 4 ? 8 : 0)];
  }
  for (unsigned i = 0; i < 4; i++) rows[i] = pair_of(elements[2 * i], elements[2 * i + 1]);
  for (unsigned i = 0; i < 4; i++) elements[i] = b[(thread * 2 + (i & 1) + (i >= 2 ? 8 : 0)) * 8 + group];
  for (unsigned i = 0; i < 2; i++) columns[i] = pair_of(elements[2 * i], elements[2 * i + 1]);
  const auto place = [&](unsigned i) { return (i < 2 ? group : group + 8) * 8 + thread * 2 + (i & 1); };
  for (unsigned i = 0; i < 4; i++) sums[i] = c[place(i)];
  multiply_add(sums, rows, columns[0], columns[1]);
  for (unsigned i = 0; i < 4; i++) d[place(i)] = sums[i];
}

TEST(Ptx, AProductHasTheLayoutsOfTheIsaAndSumsInF32) {
  std::vector<float> a(256), b(128), c(128), want(128);
  for (size_t i = 0; i < 256; i++) a[i] = static_cast<float>(i * 37 % 101) - 50;
  for (size_t i = 0; i < 128; i++) b[i] = static_cast<float>(i * 53 % 97) - 40;
  for (size_t i = 0; i < 128; i++) c[i] = static_cast<float>(i) * 1001;  // no bf16 holds these sums
  for (size_t i = 0; i < 16; i++) {
    for (size_t j = 0; j < 8; j++) {
      want[i * 8 + j] = c[i * 8 + j];
      for (size_t k = 0; k < 16; k++) want[i * 8 + j] += a[i * 16 + k] * b[k * 8 + j];
    }
  }
  const Tensor at = Tensor::from(a, {256}, kCuda), bt = Tensor::from(b, {128}, kCuda),
               ct = Tensor::from(c, {128}, kCuda);
  const Findings found = find(want, [&](float* out) {
    SHOAL_LAUNCH(product_kernel, shape_of(1, 32), at.data<float>(), bt.data<float>(), ct.data<float>(), out);
  });
  EXPECT_EQ(found.fault, "");
  EXPECT_FALSE(found.wrong);
  EXPECT_EQ(found.races, 0);
}

using Row = Pack<uint16_t, 8>;

// Four matrices of 8 x 8: element (r, c) of matrix m is 100 m + 10 r + c. out: of each lane and matrix, both
// elements; first as they lie, then transposed.
template <bool kBarrier>
__global__ void matrices_kernel(float* out) {
  SHOAL_SHARED(Row, rows, 32);
  const unsigned lane = threadIdx.x;
  for (unsigned c = 0; c < 8; c++) {
    // Row of another lane, so that a barrier is needed.
    const unsigned row = (lane + 5) % 32;
    rows[row].v[c] = static_cast<uint16_t>(row / 8 * 100 + row % 8 * 10 + c);
  }
  if (kBarrier) __syncwarp();
  uint32_t straight[4], turned[4];
  load_matrices(straight, &rows[lane]);
  load_matrices_transposed(turned, &rows[lane]);
  for (unsigned m = 0; m < 4; m++) {
    float* to = out + (lane * 4 + m) * 4;
    to[0] = static_cast<float>(straight[m] & 0xFFFFU);
    to[1] = static_cast<float>(straight[m] >> 16);
    to[2] = static_cast<float>(turned[m] & 0xFFFFU);
    to[3] = static_cast<float>(turned[m] >> 16);
  }
}

std::vector<float> dealt_matrices() {
  std::vector<float> want;
  for (int lane = 0; lane < 32; lane++) {
    for (int m = 0; m < 4; m++) {
      const int row = lane / 4, column = lane % 4 * 2;
      for (const int element :
           {row * 10 + column, row * 10 + column + 1, column * 10 + row, (column + 1) * 10 + row}) {
        want.push_back(static_cast<float>(m * 100 + element));
      }
    }
  }
  return want;
}

TEST(Ptx, MatricesAreDealtToLanesAsTheIsaSays) {
  const Findings found =
      find(dealt_matrices(), [](float* out) { SHOAL_LAUNCH(matrices_kernel<true>, shape_of(1, 32), out); });
  EXPECT_EQ(found.fault, "");
  EXPECT_FALSE(found.wrong);
  EXPECT_EQ(found.races, 0);
}

TEST(PtxFinds, AMatrixThatIsReadBeforeItIsWritten) {
  const Findings found =
      find(dealt_matrices(), [](float* out) { SHOAL_LAUNCH(matrices_kernel<false>, shape_of(1, 32), out); });
  EXPECT_TRUE(found.wrong);
  EXPECT_EQ(found.races > 0, kTsan);
}

// out: of each thread the four floats of its copy before the wait, then after it.
__global__ void copy_kernel(const float* from, float* out) {
  SHOAL_SHARED(float, tile, 64 * 4);
  float* mine = tile + threadIdx.x * 4;
  for (int i = 0; i < 4; i++) mine[i] = -1;
  copy_async(mine, from + threadIdx.x * 4, 4 * (threadIdx.x % 5));
  commit_copies();
  __syncthreads();
  wait_copies<0>();
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + static_cast<unsigned>(i)] = mine[i];
}

TEST(Ptx, ACopyBringsItsBytesAndThenZeros) {
  std::vector<float> from(256), want(256);
  for (size_t i = 0; i < 256; i++) {
    from[i] = static_cast<float>(i + 1);
    want[i] = i % 4 < i / 4 % 5 ? from[i] : 0;
  }
  const Tensor source = Tensor::from(from, {256}, kCuda);
  const Findings found =
      find(want, [&](float* out) { SHOAL_LAUNCH(copy_kernel, shape_of(1, 64), source.data<float>(), out); });
  EXPECT_EQ(found.fault, "");
  EXPECT_FALSE(found.wrong);
  EXPECT_EQ(found.races, 0);
}

// out[t]: whether thread t saw its copy arrive before its wait.
__global__ void early_kernel(const float* from, float* out) {
  SHOAL_SHARED(float, tile, 32 * 4);
  volatile float* mine = tile + threadIdx.x * 4;
  *mine = -1;
  copy_async(tile + threadIdx.x * 4, from, 16);
  commit_copies();
  __syncthreads();
  out[threadIdx.x] = *mine == 7 ? 1 : 0;
  wait_copies<0>();
}

TEST(Ptx, ACopyArrivesAtAnyMomentUntilTheWait) {
  const Tensor source = Tensor::from(std::vector<float>{7, 7, 7, 7}, {4}, kCuda);
  const emulator::Options before = emulator::options();
  const auto early_with = [&](emulator::Order order) {
    emulator::options().order = order;
    const Tensor out = Tensor::empty({32}, DType::f32, kCuda);
    races_in([&] { SHOAL_LAUNCH(early_kernel, shape_of(1, 32), source.data<float>(), out.data<float>()); });
    float early = 0;
    for (const float o : out.to_vector<float>()) early += o;
    return early;
  };
  EXPECT_EQ(early_with(emulator::Order::fifo), 0);
  EXPECT_EQ(early_with(emulator::Order::lifo), 32);
  const float some = early_with(emulator::Order::random);
  EXPECT_GT(some, 0);
  EXPECT_LT(some, 32);
  emulator::options() = before;
}

enum class CopyBug : uint8_t { none, no_wait, wait_for_fewer, no_barrier, overwrites_buffer_in_use };

// Sums tiles of 64 x 4 floats, each column of which another thread has copied; the next tile is copied while
// one is read.
template <CopyBug kBug>
__global__ void pipeline_kernel(const float* from, int num_tiles, float* out) {
  SHOAL_SHARED(float, tiles, 2 * 64 * 4);
  const unsigned t = threadIdx.x;
  const auto start = [&](int tile) {
    copy_async(tiles + (static_cast<unsigned>(tile) % 2 * 64 + t) * 4,
               from + (static_cast<unsigned>(tile) * 64 + t) * 4, 16);
    commit_copies();
  };
  float sum = 0;
  start(0);
  for (int tile = 0; tile < num_tiles; tile++) {
    if (kBug == CopyBug::overwrites_buffer_in_use && tile + 1 < num_tiles) start(tile + 1);
    if (kBug == CopyBug::wait_for_fewer ||
        (kBug == CopyBug::overwrites_buffer_in_use && tile + 1 < num_tiles)) {
      wait_copies<1>();
    } else if (kBug != CopyBug::no_wait) {
      wait_copies<0>();
    }
    if (kBug != CopyBug::no_barrier) __syncthreads();
    if (kBug != CopyBug::overwrites_buffer_in_use && tile + 1 < num_tiles) start(tile + 1);
    for (unsigned i = 0; i < 4; i++)
      sum += tiles[(static_cast<unsigned>(tile) % 2 * 64 + (t + 1) % 64) * 4 + i];
  }
  if (kBug == CopyBug::wait_for_fewer) wait_copies<0>();
  out[t] = sum;
}

template <CopyBug kBug>
Findings run_pipeline() {
  constexpr int kTiles = 5;
  std::vector<float> from(kTiles * 256), want(64, 0);
  for (size_t i = 0; i < from.size(); i++) from[i] = static_cast<float>(i);
  for (size_t i = 0; i < from.size(); i++) want[(i / 4 + 63) % 64] += from[i];
  const Tensor source = Tensor::from(from, {kTiles * 256}, kCuda);
  return find(want, [&](float* out) {
    SHOAL_LAUNCH(pipeline_kernel<kBug>, shape_of(1, 64), source.data<float>(), kTiles, out);
  });
}

TEST(PtxFinds, NothingInACorrectPipelineOfCopies) {
  const Findings found = run_pipeline<CopyBug::none>();
  EXPECT_EQ(found.fault, "");
  EXPECT_FALSE(found.wrong);
  EXPECT_EQ(found.races, 0);
}

TEST(PtxFinds, AWaitForOneGroupTooFew) {
  const Findings found = run_pipeline<CopyBug::wait_for_fewer>();
  EXPECT_EQ(found.fault, "");
  EXPECT_TRUE(found.wrong);
  EXPECT_EQ(found.races > 0, kTsan);
}

TEST(PtxFinds, ACopyIntoABufferThatOthersStillRead) {
  const Findings found = run_pipeline<CopyBug::overwrites_buffer_in_use>();
  EXPECT_EQ(found.fault, "");
  EXPECT_TRUE(found.wrong);
  EXPECT_EQ(found.races > 0, kTsan);
}

TEST(PtxFinds, CopiesOfOthersThatNoBarrierBrings) {
  const Findings found = run_pipeline<CopyBug::no_barrier>();
  EXPECT_TRUE(found.wrong);
  EXPECT_EQ(found.races > 0, kTsan);
}

TEST(PtxFinds, ACopyThatIsNeverWaitedFor) {
  const std::string fault = run_pipeline<CopyBug::no_wait>().fault;
  EXPECT_TRUE(contains(fault, "this thread ends, but has not waited for its copy_async at ")) << fault;
}

enum class Misuse : uint8_t { matrix_address, matrix_outside, copy_address, copy_bytes, copy_outside };

__global__ void misuse_kernel(const float* from, float* elsewhere, Misuse misuse) {
  SHOAL_SHARED(float, tile, 32 * 4 + 4);
  uint32_t matrices[4];
  if (misuse == Misuse::matrix_address) load_matrices(matrices, tile + threadIdx.x * 4 + 1);
  if (misuse == Misuse::matrix_outside) load_matrices_transposed(matrices, elsewhere);
  if (misuse == Misuse::copy_address) copy_async(tile, from + 1, 16);
  if (misuse == Misuse::copy_bytes) copy_async(tile, from, 17);
  if (misuse == Misuse::copy_outside) copy_async(elsewhere, from, 16);
  commit_copies();
  wait_copies<0>();
}

TEST(PtxFinds, AddressesThatHardwareRefuses) {
  const Tensor from = Tensor::from(std::vector<float>(8, 1.0F), {8}, kCuda),
               out = Tensor::empty({8}, DType::f32, kCuda);
  const auto fault_of = [&](Misuse misuse) {
    return error_of(
        [&] { SHOAL_LAUNCH(misuse_kernel, shape_of(1, 32), from.data<float>(), out.data<float>(), misuse); });
  };
  EXPECT_TRUE(contains(fault_of(Misuse::matrix_address), "expected a row aligned to 16 bytes"));
  EXPECT_TRUE(contains(fault_of(Misuse::matrix_outside), "expected an address in shared memory"));
  EXPECT_TRUE(contains(fault_of(Misuse::copy_address), "expected places aligned to 16 bytes"));
  EXPECT_TRUE(contains(fault_of(Misuse::copy_bytes), "at most 16 bytes, got 17"));
  EXPECT_TRUE(contains(fault_of(Misuse::copy_outside), "expected an address in shared memory"));
}

// out: powers of two, then the halves of rounded pairs.
__global__ void values_kernel(float infinity, float nan, float* out) {
  if (threadIdx.x != 0) return;
  const float powers[] = {3, -infinity, infinity, -130, -126};
  for (const float power : powers) *out++ = exp2_approx(power);
  *out++ = exp2_approx(nan) != exp2_approx(nan) ? 1.0F : 0.0F;
  const float pairs[][2] = {{1, -2}, {1 + 1.0F / 256, 1 + 3.0F / 256}, {nan, -infinity}};
  for (const auto& pair : pairs) {
    const uint32_t rounded = round_pair(pair[0], pair[1]);
    *out++ = static_cast<float>(rounded & 0xFFFFU);
    *out++ = static_cast<float>(rounded >> 16);
  }
}

TEST(Ptx, PowersOfTwoAndRoundedPairsAreThoseOfTheIsa) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> want = {
      8,      0,      kInfinity, /*denormals are flushed*/ 0, std::numeric_limits<float>::min(),
      1,      0x3F80, 0xC000,    /*ties go to even*/ 0x3F80,  0x3F82,
      0x7FFF, 0xFF80};
  const Findings found = find(want, [&](float* out) {
    SHOAL_LAUNCH(values_kernel, shape_of(1, 32), kInfinity, std::numeric_limits<float>::quiet_NaN(), out);
  });
  EXPECT_EQ(found.fault, "");
  EXPECT_FALSE(found.wrong);
}

}  // namespace
}  // namespace shoal::testing
