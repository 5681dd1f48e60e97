// All documented commands, run once in a copy of the sources for the tests of this folder.
//
// The copy is configured by the real CMake, but nothing is compiled: `ninja` is a stand-in that accepts the
// targets which the real Ninja knows in the copy's build folder, and takes the programs from the build that
// is being tested. Training gets few steps as one more override; the commands are run as they stand
// otherwise.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tests/docs/markdown.h"
#include "tests/support/job.h"
#include "tests/support/tiny_run.h"

namespace shoal::docs {

struct RanBlock {
  const Block* block = nullptr;
  std::string script;  // what was run; "" when everything in the block is left out
  testing::Ended ended;
};
struct LeftOut {
  const Block* block = nullptr;
  std::string command, reason;
};

class Session {
 public:
  /// Started by the first caller, which takes it about half a minute.
  static const Session& instance();

  const std::vector<RanBlock>& ran() const { return ran_; }
  const std::vector<LeftOut>& left_out() const { return left_out_; }
  /// Everything that the commands of a document have printed.
  std::string output_of(const std::string& document) const;
  std::filesystem::path root() const { return root_; }
  /// Runs `shoal` in the copy.
  testing::Ended shoal(std::vector<std::string> arguments) const;

 private:
  Session();
  void copy_tree() const;
  void add_inputs() const;
  void run(const Block& block);

  testing::TemporaryFolder folder_;
  std::filesystem::path root_;
  std::vector<RanBlock> ran_;
  std::vector<LeftOut> left_out_;
};

/// Writes the YAML of a block as an experiment file into `folder`; a part of an experiment becomes one that
/// extends configs/quickstart.yaml. Returns its name.
std::string write_experiment(const Block& block, const std::filesystem::path& folder);

}  // namespace shoal::docs
