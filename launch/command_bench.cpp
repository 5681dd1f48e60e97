// shoal bench.
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/base/log.h"
#include "launch/bench.h"
#include "launch/command_support.h"
#include "launch/commands.h"
#include "launch/memory.h"
#include "launch/same_settings.h"
#include "parallel/bootstrap.h"

namespace shoal {

namespace {

struct BenchArguments {
  std::string config;
  std::vector<std::string> settings;
  BenchOptions options;
  bool json = false;
};

int bench(const CLI::App& command, const BenchArguments& arguments) {
  const std::vector<std::string> overrides = overrides_from(command, arguments.settings);
  if (arguments.config.empty() && !overrides.empty())
    throw UsageError(
        str("bench: '", overrides.front(), "' is a setting of no config; name the config first"));
  if (arguments.config.find('=') != std::string::npos && !std::filesystem::exists(arguments.config))
    throw UsageError(str("bench: '", arguments.config, "' is a setting of no config; name the config first"));
  return run_world([&](const std::shared_ptr<Communicator>& world) {
    check_kernel_choice();
    std::optional<LoadedConfig> loaded;
    if (!arguments.config.empty()) {
      loaded = load_train_config(arguments.config, overrides, world->size());
      require_same_settings(loaded->config, *world);
      require_memory(*loaded, *world);
    }
    apply_threads(loaded ? loaded->config : TrainConfig{});
    BenchReport report = bench_machine(arguments.options, *world);
    if (loaded) {
      report.step = bench_step(*loaded, arguments.options, world);
      report.step_name = arguments.config;
    }
    if (world->rank() == 0) {
      std::fputs((arguments.json ? report.to_json().dump(2) + "\n" : report.text()).c_str(), stdout);
      std::fflush(stdout);
    }
    return static_cast<int>(ExitCode::done);
  });
}

}  // namespace

void add_bench_command(CLI::App& app, CommandAction& action) {
  CLI::App* command =
      app.add_subcommand("bench", "Measure what this machine can do, and a config's step against it");
  add_help(*command,
           "Under mpirun all ranks measure at once, and collectives are measured too. Nothing is written.",
           "  shoal bench --seconds 0.5\n"
           "  mpirun -n 2 shoal bench configs/quickstart.yaml run.precision=bf16");
  auto a = std::make_shared<BenchArguments>();
  command->add_option("config", a->config, "experiment file (YAML) whose training step is measured too");
  command->add_option("settings", a->settings, "key=value pairs that override the file");
  command->add_option("--seconds", a->options.seconds, "time of one measurement, of which there are about 60")
      ->check(number_in(0.001, 3600))
      ->capture_default_str();
  command->add_flag("--json", a->json, "print JSON instead of a table");
  command->callback([=, &action] { action = [=] { return bench(*command, *a); }; });
}

}  // namespace shoal
