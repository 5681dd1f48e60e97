// What a training takes of the device's memory, against the estimate; and that the device's memory, not the
// host's, is asked before it begins.
#include "core/backend/cuda/cublas.h"
#include "core/tensor/device_facts.h"
#include "tests/cuda/standin/memory.h"
#include "tests/cuda/support.h"
#include "tests/support/measured_memory.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

TrainConfig config_of(const std::string& settings) {
  const std::string text = "data: {text: t, seq_len: 32, global_batch: 8}\n" + settings;
  return load_train_config_text(text, "exp.yaml", {"run.device=cuda"}, 1).config;
}

// A bf16 copy of the weights of these models is 6 % of all, and only one is kept.
TEST(CudaMemoryEstimate, IsThePeakButForWorkspacesOfProducts) {
  log::set_quiet(true);
  const char* dense = "layers: 2, hidden_size: 64, heads: 4, kv_heads: 2";
  const char* sparse =
      "layers: 2, hidden_size: 64, heads: 4, moe: {num_experts: 8, top_k: 2, hidden: 64, shared_experts: 1, "
      "first_dense: 1}";
#ifdef __SANITIZE_ADDRESS__  // bytes are the same there, and steps slow
  const std::vector<std::tuple<const char*, const char*, const char*>> cases = {{dense, "bf16", "none"}};
  (void)sparse;
#else
  const std::vector<std::tuple<const char*, const char*, const char*>> cases = {
      {sparse, "bf16", "none"}, {sparse, "f32", "none"}, {dense, "bf16", "packed_weights"}};
#endif
  for (const auto& [model, precision, recompute] : cases) {
    const std::string settings =
        str("model: {", model, ", recompute: ", recompute, "}\nrun: {precision: ", precision, "}\n");
    const TrainConfig config = config_of(settings);
    const int64_t before = cuda::product_workspace_bytes(kCuda);
    const double measured = measured_bytes(config);
    const auto workspaces = static_cast<double>(cuda::product_workspace_bytes(kCuda) - before);
    EXPECT_EQ(too_far(config, measured - workspaces, 0.02), "") << settings;
  }
  log::set_quiet(false);
}

/// A process among four, two of which have each of two devices.
TEST(CudaMemory, OfADeviceIsSharedByTheRanksThatHaveIt) {
  const double all = device_facts(DeviceType::cuda).available_bytes;
  EXPECT_GT(all, 0);
  const double before = static_cast<double>(standin::device_capacity() - standin::device_bytes());
  EXPECT_EQ(all, before);
  LaunchInfo info;
  EXPECT_EQ(available_to_rank(kCuda, info, 4), all / 4) << "threads";
  info.mpi = true;
  info.local_size = 4;
  info.local_rank = 3;
  EXPECT_EQ(available_to_rank(kCuda, info, 8), all / 4) << "one device";
  const double of_host = available_memory() / 4;  // which others use meanwhile
  EXPECT_NEAR(available_to_rank(kCpu, info, 8), of_host, of_host / 4);
}

TEST(CudaMemory, KeptMemoryCountsAsAvailable) {
  const CachedMemory cached;
  const double before = device_facts(DeviceType::cuda).available_bytes;
  Tensor::empty({1 << 20}, DType::u8, kCuda);  // its segment stays
  EXPECT_EQ(device_facts(DeviceType::cuda).available_bytes, before);
  const Tensor used = Tensor::empty({1 << 20}, DType::u8, kCuda);
  EXPECT_LT(device_facts(DeviceType::cuda).available_bytes, before);
}

TEST(CudaMemory, ATrainingThatDoesNotFitTheDeviceIsRefusedBeforeItBegins) {
  TinyRun run;
  const int64_t capacity = standin::device_capacity();
  standin::device_capacity() = standin::device_bytes() + (int64_t{1} << 20);
  const std::string error = error_of([&] { run.train(1, {"run.device=cuda", "model.hidden_size=512"}); });
  standin::device_capacity() = capacity;
  EXPECT_NE(error.find("its share of the device's memory that is available"), std::string::npos) << error;
  EXPECT_FALSE(std::filesystem::exists(run.folder.path() / "tiny"));
}

}  // namespace
}  // namespace shoal::testing
