// The subcommands of `shoal`. Each adds itself to the command line and returns the process' exit code when
// run.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace shoal {

/// Set by the subcommand that the user chose; main runs it after parsing.
using CommandAction = std::function<int()>;

/// Each adds one subcommand; when the user chose it, parsing sets `action`, which returns the exit code.
void add_train_command(CLI::App& app, CommandAction& action);
void add_eval_command(CLI::App& app, CommandAction& action);
void add_generate_command(CLI::App& app, CommandAction& action);
void add_prepare_command(CLI::App& app, CommandAction& action);
void add_config_command(CLI::App& app, CommandAction& action);
void add_layout_command(CLI::App& app, CommandAction& action);
void add_bench_command(CLI::App& app, CommandAction& action);
void add_inspect_command(CLI::App& app, CommandAction& action);
void add_report_command(CLI::App& app, CommandAction& action);

/// "shoal 0.1.0 (revision ...)" and what it was built with.
std::string version_text();

}  // namespace shoal
