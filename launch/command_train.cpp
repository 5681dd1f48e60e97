// shoal train, shoal prepare.
#include "core/base/log.h"
#include "launch/command_support.h"
#include "launch/commands.h"
#include "launch/console.h"
#include "launch/memory.h"
#include "launch/same_settings.h"
#include "launch/stop_signals.h"
#include "launch/terminal.h"
#include "parallel/bootstrap.h"

namespace shoal {

namespace {

struct ConfigArguments {
  std::string config;
  std::vector<std::string> settings;
};

std::shared_ptr<ConfigArguments> add_config_arguments(CLI::App& command) {
  auto arguments = std::make_shared<ConfigArguments>();
  command.add_option("config", arguments->config, "experiment file (YAML)")->required();
  command.add_option("settings", arguments->settings,
                     "key=value pairs that override the file, e.g. optim.learning_rate=3e-4");
  return arguments;
}

int train(const CLI::App& command, const ConfigArguments& arguments) {
  const std::vector<std::string> overrides = overrides_from(command, arguments.settings);
  install_stop_signals();
  return run_world([&](const std::shared_ptr<Communicator>& world) {
    LoadedConfig loaded = load_train_config(arguments.config, overrides, world->size());
    check_kernel_choice();
    apply_threads(loaded.config);
    require_same_settings(loaded.config, *world);
    require_memory(loaded, *world);  // before the run's folder is made
    log::set_folder(loaded.config.run_folder());
    log::set_terminal_columns(terminal_columns());
    try {
      Trainer trainer(std::move(loaded), world);
      const TrainEnd end = trainer.run();
      const bool good = end != TrainEnd::not_saved && end != TrainEnd::diverged;
      return static_cast<int>(good ? ExitCode::done : ExitCode::failure);
    } catch (const StopRequested&) {
      log::info("stopped on request before the first step; start the same command to go on");
      return static_cast<int>(ExitCode::done);
    }
  });
}

}  // namespace

void add_train_command(CLI::App& app, CommandAction& action) {
  CLI::App* command =
      app.add_subcommand("train", "Train a model, from the newest checkpoint if there is one");
  add_help(*command, "SIGTERM, SIGUSR1, SIGHUP or Ctrl-C saves at the next step boundary and exits with 0.",
           "  shoal train configs/quickstart.yaml run.steps=200\n"
           "  mpirun -n 2 shoal train exp.yaml parallel.ep=2   (or srun: several ranks)");
  auto arguments = add_config_arguments(*command);
  command->callback([=, &action] { action = [=] { return train(*command, *arguments); }; });
}

void add_prepare_command(CLI::App& app, CommandAction& action) {
  CLI::App* command = app.add_subcommand(
      "prepare", "Train the tokenizer and encode the text of a config (train does it too)");
  add_help(*command, "", "  shoal prepare configs/quickstart.yaml run.name=notes 'data.text=[notes.txt]'");
  auto arguments = add_config_arguments(*command);
  command->callback([=, &action] {
    action = [=] {
      const LoadedConfig loaded =
          load_train_config(arguments->config, overrides_from(*command, arguments->settings), 0);
      check_kernel_choice();
      apply_threads(loaded.config);
      log::set_terminal_columns(terminal_columns());
      install_stop_signals();
      try {
        open_data(loaded.config, loaded.tree, *make_single_communicator());
      } catch (const StopRequested&) {
        throw Error(str("stopped on request; nothing is prepared in ", loaded.config.data.prepared));
      }
      return static_cast<int>(ExitCode::done);
    };
  });
}

}  // namespace shoal
