// What README.md and docs/*.md show is what the program does: commands, experiments, code, output.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <regex>
#include <set>

#include "tests/docs/session.h"

namespace shoal::docs {
namespace {

namespace fs = std::filesystem;
using testing::Ended;
using testing::file_bytes;

std::vector<const Block*> blocks_in(const std::string& language) {
  std::vector<const Block*> out;
  for (const Document& document : all_documents())
    for (const Block& block : document.blocks)
      if (block.language == language) out.push_back(&block);
  return out;
}

std::string squeezed(const std::string& line) {
  static const std::regex kSpaces(" +");
  return std::regex_replace(std::regex_replace(line, kSpaces, " "), std::regex("^ | $"), "");
}

/// A printed line without what differs between runs and machines: numbers with their units, names of
/// instruction sets, bars.
std::string shape(const std::string& line) {
  static const std::regex kNumber(R"((^|[^A-Za-z0-9_.])[-+]?(\d+(\.\d+)?(e[-+]?\d+)?|nan|inf))");
  static const std::regex kUnit("# (K|M|G|T|B|KiB|MiB|GiB|min|s|h)(?![A-Za-z/])");
  static const std::regex kRun("#( #)+"), kIsa("avx512_bf16|avx512|avx2|scalar"), kStep("step-[0-9]+");
  std::string out = std::regex_replace(line, kStep, "step-#");
  out = std::regex_replace(out, kIsa, "ISA");
  out = std::regex_replace(out, kNumber, "$1#");
  out = std::regex_replace(out, kUnit, "#");
  return std::regex_replace(squeezed(out), kRun, "#");
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// The words after `shoal` of a command line; empty when it is another program's.
std::vector<std::string> shoal_arguments(const std::vector<std::string>& words) {
  const auto at = std::ranges::find_if(
      words, [](const std::string& word) { return word == "shoal" || word.ends_with("/shoal"); });
  return at == words.end() ? std::vector<std::string>{} : std::vector<std::string>(at + 1, words.end());
}

/// "" when `shoal` understands the arguments: a config and its overrides as a whole, for `world` ranks; of
/// other commands the options.
std::string not_understood(const std::vector<std::string>& arguments, const std::string& world) {
  const Session& session = Session::instance();
  if (arguments.empty()) return "no command";
  const std::string& command = arguments[0];
  if (command == "train" || command == "prepare") {
    std::vector<std::string> config = {"config", "--world", world};
    config.insert(config.end(), arguments.begin() + 1, arguments.end());
    const Ended ended = session.shoal(config);
    return ended.code == 0 ? "" : ended.err;
  }
  const Ended help = session.shoal({command, "--help"});
  if (help.code != 0) return help.err;
  for (const std::string& word : arguments) {
    const std::string option = word.substr(0, word.find('='));
    if (option.starts_with("-") && !std::regex_search(help.out, std::regex("[ ,]" + option + "\\b")))
      return str("no option ", option, " in\n", help.out);
  }
  return "";
}

}  // namespace

TEST(Documents, EveryShellCommandRunsAsWritten) {
  size_t num_commands = 0;
  for (const RanBlock& ran : Session::instance().ran()) {
    num_commands += lines_of(ran.script).size();
    EXPECT_EQ(ran.ended.code, 0) << ran.block->where() << ": this block failed\n"
                                 << ran.script << "with\n"
                                 << ran.ended.all();
  }
  EXPECT_GE(num_commands, 10U) << "the documents show more commands than this";
}

TEST(Documents, CommandsThatCannotRunHereAreAtLeastUnderstood) {
  for (const LeftOut& left : Session::instance().left_out()) {
    std::printf("  not run: %s: %s: %s\n", left.block->where().c_str(), left.command.c_str(),
                left.reason.c_str());
    const std::vector<std::string> words = split_words(left.command);
    const auto first = std::ranges::find_if(
        words, [](const std::string& word) { return word.find('=') == std::string::npos; });
    ASSERT_NE(first, words.end()) << left.block->where();
    if (first->find('/') != std::string::npos && !first->starts_with("build/")) {
      EXPECT_TRUE(fs::exists(Session::instance().root() / *first))
          << left.block->where() << ": no " << *first;
    }
    const std::vector<std::string> arguments = shoal_arguments(words);
    if (arguments.empty()) continue;
    const auto ranks = std::ranges::find(words, "-n");
    const std::string world = ranks != words.end() && ranks + 1 != words.end() ? ranks[1] : "1";
    EXPECT_EQ(not_understood(arguments, world), "") << left.block->where() << ": " << left.command;
  }
}

// A command in running text is not run by anything, so only forms with placeholders may stand there.
TEST(Documents, CommandsInRunningTextAreUnderstoodByShoal) {
  static const std::regex kPlaceholder("\\[|[A-Z]{3,}|\\.\\.\\.|=value");
  for (const Document& document : all_documents()) {
    for (const CodeSpan& span : document.spans) {
      const std::vector<std::string> words =
          split_words(std::regex_replace(span.text, std::regex("[\\[\\]]"), ""));
      if (words.size() < 2) continue;
      const bool command = words[0] == "shoal" || words[0] == "cmake" || words[0] == "ninja" ||
                           words[0].find('=') != std::string::npos || words[0].starts_with("build/") ||
                           words[0].starts_with("launch/");
      if (words[0] != "shoal") {
        EXPECT_FALSE(command && span.text.find(": ") == std::string::npos)
            << span.where() << ": `" << span.text << "` belongs into a shell block, where it is run";
        continue;
      }
      std::vector<std::string> arguments(words.begin() + 1, words.end());
      if (std::regex_search(span.text, kPlaceholder) || arguments[0] != "train") {
        const Ended help = Session::instance().shoal({arguments[0], "--help"});
        EXPECT_EQ(help.code, 0) << span.where() << ": " << span.text;
        for (const std::string& word : arguments) {
          if (word.starts_with("-")) {
            EXPECT_TRUE(help.out.find(word) != std::string::npos) << span.where() << ": " << span.text;
          }
        }
      } else {
        EXPECT_EQ(not_understood(arguments, "1"), "") << span.where();
      }
    }
  }
}

TEST(Documents, EveryYamlBlockIsAnExperimentOrAPartOfOne) {
  for (const Block* block : blocks_in("yaml")) {
    const std::string name = write_experiment(*block, Session::instance().root());
    const Ended ended = Session::instance().shoal({"config", name});
    EXPECT_EQ(ended.code, 0) << block->where() << "\n" << ended.err;
  }
}

TEST(Documents, EveryCodeBlockIsAnExcerptOfTheTree) {
  for (const Block* block : blocks_in("cpp")) {
    const std::string from = block->remark("from");
    ASSERT_NE(from, "") << block->where() << ": put <!-- from: FILE --> in front of it";
    ASSERT_TRUE(fs::exists(fs::path(SHOAL_SOURCE_DIR) / from)) << block->where() << ": no " << from;
    std::string file, excerpt;
    for (const std::string& line : lines_of(file_bytes(fs::path(SHOAL_SOURCE_DIR) / from)))
      file += squeezed(line) + "\n";
    for (const std::string& line : block->lines) excerpt += squeezed(line) + "\n";
    EXPECT_NE(("\n" + file).find("\n" + excerpt), std::string::npos)
        << block->where() << ": " << from << " has not these lines:\n"
        << block->text();
  }
}

TEST(Documents, ShownOutputLooksLikeTheRealOne) {
  size_t num_blocks = 0;
  for (const Block* block : blocks_in("text")) {
    if (block->comment != "output") continue;
    num_blocks++;
    const std::string output = Session::instance().output_of(block->document);
    std::set<std::string> real;
    for (const std::string& line : lines_of(output)) real.insert(shape(line));
    for (const std::string& line : block->lines) {
      if (squeezed(line).empty() || squeezed(line) == "...") continue;
      EXPECT_TRUE(real.contains(shape(line))) << block->where() << ": no line of the real output is like\n"
                                              << line << "\nwhich counts as\n"
                                              << shape(line) << "\nThe commands print\n"
                                              << output;
    }
  }
  EXPECT_GT(num_blocks, 0U);
}

TEST(Documents, ListingOfACheckpointFolderNamesEveryFileOfARealOne) {
  size_t num_blocks = 0;
  const fs::path checkpoints = Session::instance().root() / "runs/quickstart/checkpoints";
  ASSERT_TRUE(fs::exists(checkpoints)) << "the quickstart has left no checkpoint";
  for (const Block* block : blocks_in("text")) {
    if (block->comment != "checkpoint folder") continue;
    num_blocks++;
    for (const auto& entry : fs::recursive_directory_iterator(checkpoints)) {
      if (!entry.is_regular_file()) continue;
      const std::string name = entry.path().filename().string();
      EXPECT_NE(block->text().find(name + " "), std::string::npos)
          << block->where() << " does not name " << name;
    }
  }
  EXPECT_GT(num_blocks, 0U);
}

TEST(Documents, EveryBlockIsOfAKindThatIsChecked) {
  static const std::map<std::string, std::regex> kComments = {
      {"sh", std::regex("(not run( \\(.+\\))?: .+)?")},
      {"yaml", std::regex("(file: [a-z_.]+\\.yaml)?")},
      {"cpp", std::regex("from: .+")},
      {"text", std::regex("output|checkpoint folder|picture")},
  };
  for (const Document& document : all_documents()) {
    for (const Block& block : document.blocks) {
      const auto kind = kComments.find(block.language);
      ASSERT_NE(kind, kComments.end()) << block.where() << ": language '" << block.language << "'";
      EXPECT_TRUE(std::regex_match(block.comment, kind->second))
          << block.where() << ": no meaning for a block of '" << block.language << "': <!-- " << block.comment
          << " -->";
    }
  }
}

}  // namespace shoal::docs
