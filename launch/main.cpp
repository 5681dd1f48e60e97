// shoal: trains mixture-of-experts language models. This file only parses the command line.
#include <algorithm>
#include <cstdio>

#include "core/base/error.h"
#include "core/base/text.h"
#include "data/file_io.h"
#include "launch/commands.h"

int main(int argc, char** argv) {
  using namespace shoal;
  CLI::App app{
      "Shoal trains mixture-of-experts language models across many ranks.\n"
      "Start with: mpirun -n 2 shoal train configs/quickstart.yaml"};
  app.set_version_flag("--version", version_text);
  app.require_subcommand(1);
  app.footer(
      "`shoal COMMAND --help` shows the options of a command, with examples.\n"
      "Exit codes: 0 done, or saved on request; 1 failure at run time; 2 wrong command, config or input.");
  app.failure_message([](const CLI::App*, const CLI::Error& e) {
    return str("error: ", e.what(), "\nRun with --help for more information.\n");
  });
  CommandAction action;
  add_prepare_command(app, action);
  add_train_command(app, action);
  add_eval_command(app, action);
  add_generate_command(app, action);
  add_inspect_command(app, action);
  add_report_command(app, action);
  add_config_command(app, action);
  add_layout_command(app, action);
  add_bench_command(app, action);

  // CLI11 knows no suggestions.
  if (argc > 1) {
    const bool option = argv[1][0] == '-';
    std::vector<std::string> names, commands;
    for (const CLI::App* command : app.get_subcommands({})) commands.push_back(command->get_name());
    if (option) names = {"--help", "-h", "--version"};
    if (!option) names = commands;
    if (std::find(names.begin(), names.end(), argv[1]) == names.end()) {
      std::fprintf(stderr, "error: unknown %s '%s'%s; commands: %s\n", option ? "option" : "command", argv[1],
                   suggest(argv[1], names).c_str(), join(commands, ", ").c_str());
      return static_cast<int>(ExitCode::usage);
    }
  }
  try {
    app.parse(argc, argv);
    report_truncated_maps();
    return action();
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : static_cast<int>(ExitCode::usage);
  } catch (const Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return static_cast<int>(e.code());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", exception_text(e).c_str());
    return static_cast<int>(ExitCode::failure);
  }
}
