#include "tests/docs/session.h"

#include <regex>

namespace shoal::docs {

namespace fs = std::filesystem;
using testing::Ended;
using testing::Job;

namespace {

constexpr const char* kNinja = R"sh(#!/bin/bash
set -e
real=$(type -ap ninja | sed -n 2p)
[[ $* == *"-C "* && $* != *"-t "* ]] || exec "$real" "$@"  # CMake's own calls
folder=. targets=()
while [[ $# -gt 0 ]]; do
  case $1 in
    -C) folder=$2; shift ;;
    -*) ;;
    *) targets+=("$1") ;;
  esac
  shift
done
for target in "${targets[@]}"; do
  "$real" -C "$folder" -t query "$target" >/dev/null
  program=$(cd "$BUILT" && find . -name "$target" -type f -perm -u+x | head -n 1)
  [[ -n $program ]] || { echo "ninja: $target is not built in $BUILT" >&2; exit 1; }
  mkdir -p "$folder/$(dirname "$program")"
  ln -sf "$BUILT/$program" "$folder/$program"
done
)sh";

/// A command with what makes it quick: training gets one more override, which its documentation offers.
std::string shortened(const std::string& command) {
  static const std::regex kTrains("((launch/quickstart\\.sh|shoal train )[^#]*[^# ])( *(#.*)?)$");
  static const std::regex kQuickstart("(launch/quickstart\\.sh)( *(#.*)?)$");
  const std::string with = std::regex_replace(command, kTrains, "$1 run.steps=3$3");
  return with != command ? with : std::regex_replace(command, kQuickstart, "$1 run.steps=3$2");
}

}  // namespace

std::string write_experiment(const Block& block, const fs::path& folder) {
  const std::string name = block.remark("file");
  if (!name.empty()) {
    std::ofstream(folder / name) << block.text();
    return name;
  }
  const std::string part =
      str("part-of-", fs::path(block.document).stem().string(), "-", block.line, ".yaml");
  std::ofstream(folder / part) << "extends: configs/quickstart.yaml\n" << block.text();
  return part;
}

const Session& Session::instance() {
  static const Session session;
  return session;
}

Session::Session() : root_(folder_ / "a copy") {
  fs::create_directories(root_);
  copy_tree();
  add_inputs();
  for (const Document& document : all_documents()) {
    for (const Block& block : document.blocks)
      if (block.language == "yaml" && !block.remark("file").empty()) write_experiment(block, root_);
  }
  for (const Document& document : all_documents()) {
    for (const Block& block : document.blocks)
      if (block.language == "sh") run(block);
  }
}

void Session::copy_tree() const {
  for (const char* entry : {"CMakeLists.txt", "README.md", "configs", "core", "data", "docs", "launch",
                            "models", "optim", "parallel", "tests"}) {
    fs::copy(fs::path(SHOAL_SOURCE_DIR) / entry, root_ / entry, fs::copy_options::recursive);
  }
}

void Session::add_inputs() const {
  fs::create_directories(folder_ / "bin");
  std::ofstream(folder_ / "bin/ninja") << kNinja;
  fs::permissions(folder_ / "bin/ninja", fs::perms::owner_all);
  // Texts that the documents name as the reader's own.
  for (const char* text : {"tinyshakespeare.txt", "book.txt"}) testing::write_learnable_text(root_ / text);
}

void Session::run(const Block& block) {
  static const std::regex kNotRun(R"(not run( \((.*)\))?: (.+))");
  std::smatch except;
  const bool some = std::regex_match(block.comment, except, kNotRun);
  RanBlock ran{&block, "", {}};
  for (const std::string& command : commands_of(block)) {
    if (some && (!except[1].matched || command.starts_with(except[2].str())))
      left_out_.push_back({&block, command, except[3]});
    else
      ran.script += shortened(command) + "\n";
  }
  if (ran.script.empty()) return;
  // Open MPI's own variables for --allow-run-as-root and --oversubscribe.
  const std::string environment =
      str("export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
          "OMPI_MCA_rmaps_base_oversubscribe=1\n",
          "export BUILT='", SHOAL_BINARY_DIR, "' PATH='", (folder_ / "bin").string(), "':\"$PATH\"\n",
          "unset TEXT RANKS\n");
  Job job({"bash", "-e", "-o", "pipefail", "-c", environment + "set -x\n" + ran.script}, root_);
  ran.ended = job.wait(300);
  ran_.push_back(std::move(ran));
}

std::string Session::output_of(const std::string& document) const {
  std::string out;
  for (const RanBlock& ran : ran_)
    if (ran.block->document == document) out += ran.ended.out;
  return out;
}

Ended Session::shoal(std::vector<std::string> arguments) const {
  arguments.insert(arguments.begin(), SHOAL_BINARY_DIR "/shoal");
  return Job(arguments, root_).wait();
}

}  // namespace shoal::docs
