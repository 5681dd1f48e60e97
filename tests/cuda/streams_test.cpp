// The order of work: a layer in two parts that overlaps exchange and computation, as the engine's will, and
// each kind of mistake in it, planted. Some policy of the stand-in's streams, or TSan, must find each.
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <cstring>

#include "core/tensor/stream.h"
#include "tests/cuda/races.h"
#include "tests/cuda/standin/streams.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

enum class Bug : uint8_t {
  none,
  send_does_not_wait_for_rows,
  product_does_not_wait_for_arrival,
  product_waits_for_the_wrong_part,
  send_back_does_not_wait_for_product,
  host_reads_before_the_copy,
  host_overwrites_a_copy_on_its_way,
  freed_while_another_stream_reads,
};
constexpr Bug kBugs[] = {Bug::send_does_not_wait_for_rows,      Bug::product_does_not_wait_for_arrival,
                         Bug::product_waits_for_the_wrong_part, Bug::send_back_does_not_wait_for_product,
                         Bug::host_reads_before_the_copy,       Bug::host_overwrites_a_copy_on_its_way,
                         Bug::freed_while_another_stream_reads};

constexpr int64_t kCount = 96;
constexpr int kParts = 2;

/// Host memory that copies use directly.
class HostRows {
 public:
  HostRows() : data_(static_cast<float*>(device_runtime(DeviceType::cuda).allocate_host(kCount * 4))) {}
  ~HostRows() { device_runtime(DeviceType::cuda).release_host(data_); }
  HostRows(const HostRows&) = delete;
  HostRows& operator=(const HostRows&) = delete;
  float* data() const { return data_; }
  void to(const Tensor& x) const {
    device_runtime(DeviceType::cuda).copy(x.bytes(), kCuda, data_, kCpu, kCount * 4);
  }
  void from(const Tensor& x) const {
    device_runtime(DeviceType::cuda).copy(data_, kCpu, x.bytes(), kCuda, kCount * 4);
  }

 private:
  float* data_;
};

Tensor rows() {
  return Tensor::empty({kCount}, DType::f32, kCuda);
}
// One kernel for each mistake: TSan tells a race of the same two places once.
template <Bug bug>
__global__ void times_kernel(const float* x, float factor, float* y) {
  for (int64_t i = threadIdx.x; i < kCount; i += blockDim.x) y[i] = factor * x[i];
}

/// x times factor, on the current stream.
template <Bug bug>
Tensor times(const Tensor& x, float factor) {
  const Tensor y = rows();
  SHOAL_LAUNCH((times_kernel<bug>), cuda::launch_shape(kCuda, 1, 32), x.data<float>(), factor,
               y.data<float>());
  return y;
}

/// x -> 2 x, sent, -> 3 x, sent back; in two parts. Whether the host got 6 x + part.
template <Bug bug>
bool layer() {
  const Stream compute = make_stream(kCuda), comm = make_stream(kCuda);
  const StreamScope computing(compute);
  const HostRows in[kParts], out[kParts];
  Tensor packed[kParts], arrived[kParts], results[kParts], back[kParts];
  Event rows_ready[kParts], here[kParts], done[kParts], sent_back[kParts];
  for (int p = 0; p < kParts; p++) {
    for (int64_t i = 0; i < kCount; i++) in[p].data()[i] = static_cast<float>(i + p);
    std::memset(out[p].data(), 0, kCount * 4);
    const Tensor x = rows();
    in[p].to(x);
    if (bug == Bug::host_overwrites_a_copy_on_its_way) in[p].data()[7] = -1;
    packed[p] = times<bug>(x, 2);
    rows_ready[p].record(compute);
  }
  for (int p = 0; p < kParts; p++) {
    const StreamScope sending(comm);
    if (bug != Bug::send_does_not_wait_for_rows) rows_ready[p].wait(comm);
    arrived[p] = packed[p].clone();
    here[p].record(comm);
  }
  if (bug != Bug::freed_while_another_stream_reads) packed[1].used_on(comm);
  packed[1] = {};
  const Tensor next_user = Tensor::zeros({kCount}, DType::f32, kCuda);
  for (int p = 0; p < kParts; p++) {
    const int of = bug == Bug::product_waits_for_the_wrong_part ? 0 : p;
    if (bug != Bug::product_does_not_wait_for_arrival) here[of].wait(compute);
    results[p] = times<bug>(arrived[p], 3);
    done[p].record(compute);
    if (bug != Bug::send_back_does_not_wait_for_product) done[p].wait(comm);
    const StreamScope sending(comm);
    back[p] = results[p].clone();
    out[p].from(back[p]);
    sent_back[p].record(comm);
  }
  for (const Event& event : sent_back) {
    if (bug != Bug::host_reads_before_the_copy) event.host_wait();
  }
  bool right = true;
  for (int p = 0; p < kParts; p++) {
    for (int64_t i = 0; i < kCount; i++) right = right && out[p].data()[i] == static_cast<float>(6 * (i + p));
  }
  device_runtime(DeviceType::cuda).synchronize();
  return right;
}

bool layer_is_right(Bug bug) {
  switch (bug) {
    case Bug::none:
      return layer<Bug::none>();
    case Bug::send_does_not_wait_for_rows:
      return layer<Bug::send_does_not_wait_for_rows>();
    case Bug::product_does_not_wait_for_arrival:
      return layer<Bug::product_does_not_wait_for_arrival>();
    case Bug::product_waits_for_the_wrong_part:
      return layer<Bug::product_waits_for_the_wrong_part>();
    case Bug::send_back_does_not_wait_for_product:
      return layer<Bug::send_back_does_not_wait_for_product>();
    case Bug::host_reads_before_the_copy:
      return layer<Bug::host_reads_before_the_copy>();
    case Bug::host_overwrites_a_copy_on_its_way:
      return layer<Bug::host_overwrites_a_copy_on_its_way>();
    case Bug::freed_while_another_stream_reads:
      return layer<Bug::freed_while_another_stream_reads>();
  }
  return false;
}

std::vector<standin::Options> policies() {
  using standin::Policy;
  std::vector<standin::Options> all = {
      {Policy::eager, 0, 1}, {Policy::lazy, 0, 1}, {Policy::favour, 1, 1}, {Policy::favour, 2, 1}};
  for (uint64_t seed = 1; seed <= 10; seed++) all.push_back({Policy::random, 0, seed});
  return all;
}

class StreamPolicies : public ::testing::Test {
 protected:
  void TearDown() override { standin::set_options({}); }
};
using CudaStreams = StreamPolicies;

TEST_F(CudaStreams, ALayerThatWaitsWhereItMustIsRightUnderEveryPolicy) {
  for (const standin::Options& policy : policies()) {
    standin::set_options(policy);
    const CachedMemory cached;
    EXPECT_TRUE(layer_is_right(Bug::none)) << "policy " << static_cast<int>(policy.policy) << ", favoured "
                                           << policy.favoured << ", seed " << policy.seed;
  }
}

TEST_F(CudaStreams, EachPlantedMistakeIsFoundBySomePolicyAndByTsan) {
  for (const Bug bug : kBugs) {
    bool wrong = false;
#ifdef SHOAL_EMULATOR_TSAN
    // TSan forgets about threads when there are many, so in several orders. Without cached memory: the host
    // asks whether streams are done with that, and what it learns so orders what it launches next.
    int races = 0;
    for (const standin::Options& policy : policies()) {
      if (races > 0) break;
      standin::set_options(policy);
      races += races_in([&] { layer_is_right(bug); });
    }
    EXPECT_GT(races, 0) << "planted mistake " << static_cast<int>(bug);
    wrong = true;
#endif
    const CachedMemory cached;
    for (const standin::Options& policy : policies()) {
      if (wrong) break;
      standin::set_options(policy);
      wrong = wrong || !layer_is_right(bug);
      EXPECT_FALSE(wrong && policy.policy == standin::Policy::eager) << "found without laziness";
    }
    EXPECT_TRUE(wrong) << "planted mistake " << static_cast<int>(bug);
  }
}

TEST_F(CudaStreams, TheHostCannotReadDeviceMemory) {
#ifndef SHOAL_EMULATOR_TSAN  // which does not like forks
  const Tensor x = Tensor::zeros({4}, DType::f32, kCuda);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    volatile float* data = x.data<float>();
    _exit(data[0] == 0 ? 10 : 11);
  }
  ::close(ends[1]);
  std::string text(1 << 16, '\0');
  size_t length = 0;
  for (ssize_t got = 0; (got = read(ends[0], text.data() + length, text.size() - length)) > 0;)
    length += static_cast<size_t>(got);
  ::close(ends[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_FALSE(WIFEXITED(status) && WEXITSTATUS(status) >= 10);
  EXPECT_NE(text.find("host code reads or writes device memory"), std::string::npos)
      << text.substr(0, length);
#endif
}

TEST_F(CudaStreams, TheHostWaitsForWhatItAsksForAndNoMore) {
  standin::set_options({standin::Policy::lazy, 0, 1});
  const Stream one = make_stream(kCuda), other = make_stream(kCuda);
  std::array<char, 8> text{};
  std::atomic<size_t> length{0};
  const auto put = [&](const Stream& stream, char c) {
    standin::enqueue(reinterpret_cast<cudaStream_t>(stream.handle), "note",
                     [&, c] { text[length.fetch_add(1, std::memory_order_relaxed)] = c; });
  };
  const auto log = [&] { return std::string(text.data(), length); };
  put(one, 'a');
  put(other, 'b');
  Event first, second;
  first.record(one);
  put(one, 'c');
  EXPECT_EQ(log(), "");
  EXPECT_FALSE(first.reached());
  first.host_wait();
  EXPECT_EQ(log(), "a");
  EXPECT_TRUE(first.reached());
  second.record(one);
  second.wait(other);
  put(other, 'd');
  Event last;
  last.record(other);
  last.host_wait();
  EXPECT_EQ(log(), "abcd");
}

TEST_F(CudaStreams, WorkThatWaitsForItselfIsFound) {
  standin::set_options({standin::Policy::lazy, 0, 1});
  const Stream one = make_stream(kCuda), other = make_stream(kCuda);
  const auto handle = [](const Stream& s) { return reinterpret_cast<cudaStream_t>(s.handle); };
  std::atomic<bool> may_end{false};
  std::atomic<uint64_t> last{0};
  standin::enqueue_attempts(handle(one), "needs the other stream", [&](std::vector<standin::Need>& needs) {
    needs.push_back({handle(other), last});
    return may_end.load();
  });
  Event end;
  end.record(one);
  end.wait(other);
  last = standin::enqueue(handle(other), "last", [] {});
  const std::string expected = "'needs the other stream' waits for work that waits for it";
  EXPECT_NE(error_of([&] { end.host_wait(); }).find(expected), std::string::npos);
  may_end = true;
  end.host_wait();
}

TEST_F(CudaStreams, AnErrorOfWorkIsThrownWhereTheHostWaits) {
  standin::set_options({standin::Policy::lazy, 0, 1});
  standin::enqueue(nullptr, "bad", [] { throw Error("bad work"); });
  EXPECT_EQ(error_of([] { device_runtime(DeviceType::cuda).synchronize(); }), "bad work");
  device_runtime(DeviceType::cuda).synchronize();  // once
}

}  // namespace
}  // namespace shoal::testing
