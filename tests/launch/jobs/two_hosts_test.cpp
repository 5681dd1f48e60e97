// Ranks on two hosts, which are network namespaces of this machine (two_hosts.sh).
#include "tests/launch/jobs/shoal_jobs.h"

namespace shoal::testing {
namespace {

TEST(TwoHosts, GiveTheLossesOfOneAndTwoLevelsOfDispatchMoveFewerBytesBetweenThem) {
  const TemporaryFolder folder;
  const std::string script = SHOAL_SOURCE_DIR "/tests/launch/jobs/two_hosts.sh";
  const Ended ended = Job({script, SHOAL_BINARY_DIR}, folder.path()).wait(300);
  if (ended.code == 77) GTEST_SKIP() << ended.out;
  EXPECT_EQ(ended.code, 0) << ended.all();
  EXPECT_TRUE(contains(ended.out, "passed: two hosts give the losses of one")) << ended.all();
}

}  // namespace
}  // namespace shoal::testing
