// main of the tests that run under mpirun: rank 0 prints, any failed rank fails the run. An exception is not
// caught by GoogleTest, because the other ranks would go on without this one: it ends the job.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <vector>

#include "parallel/bootstrap.h"
#include "parallel/mpi_communicator.h"
#include "parallel/shared_communicator.h"
#include "tests/mpi/mpi_world.h"

namespace {

std::shared_ptr<shoal::Communicator> world;
std::vector<shoal::testing::Transport> transports;

/// Other ranks print only what fails.
class FailurePrinter final : public ::testing::EmptyTestEventListener {
 public:
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::cerr << "[rank " << world->rank() << "] " << result.file_name() << ':' << result.line_number()
              << ": " << result.message() << std::endl;
  }
};

}  // namespace

const std::shared_ptr<shoal::Communicator>& shoal::testing::mpi_world() {
  return world;
}

const shoal::testing::Transport& shoal::testing::transport(const std::string& name) {
  return name == "mpi" ? transports.at(0) : transports.at(1);
}

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(catch_exceptions, false);
  return shoal::run_world([&](const std::shared_ptr<shoal::Communicator>& started) {
    if (const char* probe = std::getenv("SHOAL_TEST_PROBE")) return shoal::testing::run_probe(probe, started);
    world = started;
    transports = {{"mpi", shoal::make_mpi_world()}, {"shared", shoal::share_memory(shoal::make_mpi_world())}};
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    if (world->rank() != 0) {
      delete listeners.Release(listeners.default_result_printer());
      delete listeners.Release(listeners.default_xml_generator());  // one rank writes the --gtest_output file
      listeners.Append(new FailurePrinter);
    }
    const bool failed = RUN_ALL_TESTS() != 0;
    const int64_t num_failed = world->sum(int64_t{failed ? 1 : 0});
    if (num_failed > 0 && world->rank() == 0) std::cerr << num_failed << " ranks failed" << std::endl;
    transports.clear();
    world.reset();
    return num_failed > 0 ? 1 : 0;
  });
}
