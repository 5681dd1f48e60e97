// The help of every command and what a mistyped option gets, found by walking the commands themselves.
#include "launch/commands.h"

#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/base/text.h"

namespace shoal::testing {
namespace {

struct Commands {
  Commands() {
    add_prepare_command(app, action);
    add_train_command(app, action);
    add_eval_command(app, action);
    add_generate_command(app, action);
    add_inspect_command(app, action);
    add_report_command(app, action);
    add_config_command(app, action);
    add_layout_command(app, action);
    add_bench_command(app, action);
  }
  std::vector<CLI::App*> all() { return app.get_subcommands({}); }

  CLI::App app;
  CommandAction action;
};

/// The message when the command is given these arguments.
std::string refusal(std::vector<std::string> arguments) {
  Commands commands;
  std::ranges::reverse(arguments);  // as CLI11 takes them
  try {
    commands.app.parse(arguments);
    commands.action();
  } catch (const UsageError& e) {
    return e.what();
  } catch (const std::exception& e) {
    return str("(not a UsageError) ", e.what());
  }
  return "(no refusal)";
}

TEST(Commands, HelpShowsExamplesExitCodesAndEveryOptionWithItsDefault) {
  Commands commands;
  EXPECT_EQ(commands.all().size(), 9U);
  for (CLI::App* command : commands.all()) {
    const std::string name = command->get_name(), help = command->help();
    EXPECT_FALSE(command->get_description().empty()) << name;
    EXPECT_NE(help.find("Examples:\n  shoal " + name + " "), std::string::npos) << help;
    EXPECT_NE(help.find("Exit codes: 0 done"), std::string::npos) << help;
    for (const CLI::Option* option : command->get_options()) {
      EXPECT_FALSE(option->get_description().empty()) << name << " " << option->get_name();
      const bool takes_value = option->get_items_expected_max() > 0 && !option->get_lnames().empty();
      if (!takes_value) continue;
      const bool default_shown = !option->get_default_str().empty() ||
                                 option->get_description().find("default:") != std::string::npos;
      EXPECT_TRUE(default_shown) << name << " " << option->get_name();
    }
  }
}

TEST(Commands, AMistypedOptionGetsTheNearestOne) {
  Commands commands;
  int tried = 0;
  for (CLI::App* command : commands.all()) {
    for (const CLI::Option* option : command->get_options()) {
      for (const std::string& name : option->get_lnames()) {
        std::string typo = "--" + name;
        typo.insert(4, 1, typo[4]);  // one letter twice
        for (const std::string& argument : {typo, typo + "=3"}) {
          const std::string message = refusal({command->get_name(), "somewhere", argument});
          EXPECT_NE(message.find(str("shoal ", command->get_name(), ": unknown argument '", typo,
                                     "', did you mean '--", name, "'?")),
                    std::string::npos)
              << message;
          tried++;
        }
      }
    }
  }
  EXPECT_GT(tried, 30);
}

TEST(Commands, WhatIsNeitherOptionNorSettingIsRefused) {
  for (const char* command : {"train", "prepare", "eval", "generate", "config"}) {
    const std::string message = refusal({command, "somewhere", "steps"});
    EXPECT_NE(message.find("unknown argument 'steps'; settings are given as key=value"), std::string::npos)
        << message;
  }
  EXPECT_NE(refusal({"inspect", "somewhere", "more"}).find("unknown argument 'more'"), std::string::npos);
  // With dashes a setting is a setting.
  EXPECT_NE(refusal({"config", "nowhere.yaml", "--run.steps=3"}).find("no such file"), std::string::npos);
  EXPECT_NE(refusal({"config", "nowhere.yaml", "--run={steps: 3}"}).find("no such file"), std::string::npos);
}

}  // namespace
}  // namespace shoal::testing
