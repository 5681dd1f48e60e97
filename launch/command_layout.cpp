// shoal layout: what a number of ranks would hold and send. No ranks, no training.
#include <cstdio>

#include "core/base/log.h"
#include "launch/command_support.h"
#include "launch/commands.h"
#include "launch/layout_page.h"
#include "launch/memory.h"

namespace shoal {

void add_layout_command(CLI::App& app, CommandAction& action) {
  constexpr int kMaxRanks = 4096;
  CLI::App* command =
      app.add_subcommand("layout", "Show what each of a number of ranks would hold and send, without them");
  add_help(
      *command,
      "Prints both grids, memory per rank and bytes sent per step and axis. A layout that is not legal is "
      "exit code 2, with every rule that it breaks.",
      "  shoal layout exp.yaml --world 64 parallel.ep=8 parallel.ranks_per_node=8\n"
      "  shoal layout exp.yaml --world 512 parallel.tp=8 parallel.pp=4 parallel.zero=1");
  auto file = std::make_shared<std::string>();
  auto settings = std::make_shared<std::vector<std::string>>();
  auto world = std::make_shared<int64_t>(1);
  command->add_option("file", *file, "experiment file (YAML)")->required();
  command->add_option("settings", *settings, "key=value pairs that override the file");
  command->add_option("--world", *world, "number of ranks; they need not exist")
      ->check(number_in(1, kMaxRanks))
      ->capture_default_str();
  command->callback([=, &action] {
    action = [=] {
      const auto ranks = static_cast<int>(*world);
      const LoadedConfig loaded = load_train_config(*file, overrides_from(*command, *settings), ranks);
      const ExpectedVocab vocab = expected_vocab(loaded.config, /*prepared=*/true);
      if (!vocab.known) log::warn("a vocabulary of ", vocab.size, " is assumed: ", kUnknownVocab);
      const std::string page = layout_page(loaded.config, layout_of(loaded.config, ranks), vocab.size);
      std::fputs(page.c_str(), stdout);
      return 0;
    };
  });
}

}  // namespace shoal
