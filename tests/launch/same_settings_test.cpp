#include "launch/same_settings.h"

#include <gtest/gtest.h>

#include <atomic>

#include "core/base/error.h"

namespace shoal {
namespace {

TrainConfig config_with(const std::vector<std::string>& overrides) {
  return load_train_config_text("data: {text: t, seq_len: 64, global_batch: 6}\n", "exp.yaml", overrides, 3)
      .config;
}

/// What each of three ranks is told, when rank 2 has other overrides; "" when nothing.
std::vector<std::string> told(const std::vector<std::string>& overrides) {
  std::vector<std::string> out(3);
  run_ranks(3, [&](const std::shared_ptr<Communicator>& world) {
    const auto rank = static_cast<size_t>(world->rank());
    try {
      require_same_settings(config_with(rank == 2 ? overrides : std::vector<std::string>{}), *world);
    } catch (const UsageError& e) {
      out[rank] = e.what();
    }
  });
  return out;
}

TEST(SameSettings, EqualOnesPass) {
  EXPECT_EQ(told({}), std::vector<std::string>(3));
}

TEST(SameSettings, EveryRankNamesTheRankAndKeyThatDiffer) {
  for (const std::string& message : told({"optim.learning_rate=0.125"})) {
    EXPECT_NE(message.find("rank 2: optim.learning_rate: expected "), std::string::npos) << message;
    EXPECT_NE(message.find("got 0.125"), std::string::npos) << message;
    EXPECT_EQ(message.find("rank 1:"), std::string::npos) << message;
  }
  for (const std::string& message : told({"run.profile=3"}))
    EXPECT_NE(message.find("rank 2: run.profile: "), std::string::npos) << message;
}

TEST(SameSettings, VariablesThatChangeBitsMustBeEqual) {
  for (const char* which : {"SHOAL_ATTENTION", "SHOAL_GEMM", "SHOAL_NCCL_SUMS"}) {
    std::vector<std::string> messages(3);
    run_ranks(3, [&](const std::shared_ptr<Communicator>& world) {
      const int rank = world->rank();
      const VariableReader read = [&](const char* name) {
        return rank == 1 && std::string(name) == which ? "other" : std::string();
      };
      try {
        require_same_settings(config_with({}), *world, read);
      } catch (const UsageError& e) {
        messages[static_cast<size_t>(rank)] = e.what();
      }
    });
    for (const std::string& message : messages)
      EXPECT_NE(message.find(str("rank 1: environment variable ", which,
                                 ": expected nothing as on rank 0, got other")),
                std::string::npos)
          << message;
  }
}

TEST(SameSettings, ThreadsMayDiffer) {
  EXPECT_EQ(told({"run.threads=7"}), std::vector<std::string>(3));
}

}  // namespace
}  // namespace shoal
