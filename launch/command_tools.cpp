// shoal config, shoal inspect, shoal report, shoal --version: no ranks, no training.
#include <cstdio>
#include <filesystem>
#include <numeric>

#include "core/base/text.h"
#include "core/tensor/kernel.h"
#include "launch/checkpoint.h"
#include "launch/command_support.h"
#include "launch/commands.h"
#include "launch/engine_options.h"
#include "launch/memory.h"
#include "launch/report.h"
#include "parallel/bootstrap.h"
#include "version.h"

namespace shoal {

std::string version_text() {
  check_kernel_choice();
  return str("shoal ", SHOAL_VERSION, " (revision ", SHOAL_REVISION, ")\n", "compiler  ", SHOAL_COMPILER,
             "\nmpi       ", mpi_library_version(), "\nhdf5      ", SHOAL_HDF5_VERSION, "\ncuda      ",
             SHOAL_CUDA_VERSION, "\nnccl      none\ncpu       ", cpu_isa_name(cpu_isa()), " kernels");
}

namespace {

struct ConfigCommand {
  std::string file, explain;
  std::vector<std::string> settings;
  bool schema = false;
  int64_t world = 0;
};

/// What the config has for a key and for those below it.
std::string settings_below(const TrainConfig& config, const std::string& key, const std::string& file) {
  std::string out;
  for (const auto& [name, value] : flat_settings(to_yaml(config))) {
    if (name == key || name.starts_with(key + ".")) out += str("  ", name, ": ", value, "\n");
  }
  return out.empty() ? out : str("in ", file, ":\n", out);
}

/// A comment under the printed config. Without --world: for as few ranks as the layout needs. Throws
/// UsageError when there is no such layout.
std::string memory_line(const LoadedConfig& loaded, int world) {
  const ParallelOptions& parallel = loaded.config.parallel;
  if (world <= 0) {
    const int64_t model = parallel.tp * parallel.cp * parallel.pp;
    world =
        static_cast<int>(std::lcm(model * parallel.dp.value_or(1), parallel.etp * parallel.ep.value_or(1)));
  }
  ConfigErrors errors;
  const TrainConfig& config = loaded.config;
  const LayoutFacts facts = layout_facts(config, world);
  const ParallelLayout layout = resolve_layout(parallel, facts, loaded.tree, errors);
  errors.throw_if_any();
  const ExpectedVocab vocab = expected_vocab(config, /*prepared=*/true);
  const MemoryEstimate estimate = estimate_memory(config, layout, vocab.size);
  const double available = available_memory();
  std::string line =
      str("# memory per rank, with ", world, world == 1 ? " rank: " : " ranks: ", estimate.text(), "\n");
  if (!vocab.known)
    line += str("# with a vocabulary of ", vocab.size, ", which is assumed: ", kUnknownVocab, "\n");
  const bool on_host = device_of(config).type == DeviceType::cpu;  // a device may be another machine's
  if (on_host && estimate.total() > available)
    line +=
        str("# more than the ", human_bytes(static_cast<int64_t>(available)), " available on this machine\n");
  return line;
}

int show_config(const CLI::App& command, const ConfigCommand& arguments) {
  TrainConfig defaults;
  defaults.model.options = ModelRegistry::instance().make_options(defaults.model.kind);
  auto fields = [&](FieldVisitor& v) { defaults.fields(v); };
  if (arguments.schema) {
    std::puts(schema_of(fields).c_str());
    return 0;
  }
  std::string explanation;
  if (!arguments.explain.empty()) explanation = explain_field(fields, arguments.explain) + "\n";
  if (!explanation.empty() && arguments.file.empty()) {
    std::fputs(explanation.c_str(), stdout);
    return 0;
  }
  if (arguments.file.empty())
    throw UsageError("shoal config: expected a config file, --schema or --explain KEY");
  LoadedConfig loaded = load_train_config(arguments.file, overrides_from(command, arguments.settings),
                                          static_cast<int>(arguments.world));
  if (explanation.empty()) {
    auto resolved = [&](FieldVisitor& v) { loaded.config.fields(v); };
    explanation =
        print_fields(resolved, &loaded.tree) + memory_line(loaded, static_cast<int>(arguments.world));
  } else {
    explanation += settings_below(loaded.config, arguments.explain, arguments.file);
  }
  std::fputs(explanation.c_str(), stdout);
  return 0;
}

int inspect(const std::string& target, bool tensors, bool verify) {
  namespace fs = std::filesystem;
  const fs::path path(target);
  if (!fs::is_directory(path))
    throw UsageError(
        str("inspect: '", target, "' is not a folder; give a run, its checkpoints, or one of them"));
  const bool one = fs::exists(path / "MANIFEST.json");
  const fs::path folder = one                                ? path.parent_path()
                          : fs::exists(path / "checkpoints") ? path / "checkpoints"
                                                             : path;
  std::vector<CheckpointInfo> all = list_checkpoints(folder.empty() ? "." : folder, verify);
  if (one) std::erase_if(all, [&](const CheckpointInfo& c) { return c.path.filename() != path.filename(); });
  if (all.empty()) throw UsageError(str("inspect: ", folder.string(), " holds no checkpoint"));
  bool good = true;
  std::printf("%10s %9s %12s  %s\n", "step", "tensors", "size", verify ? "checksums" : "path");
  for (const CheckpointInfo& c : all) {
    good &= c.problem.empty();
    const std::string last = !c.problem.empty() ? "BAD: " + c.problem : verify ? "ok" : c.path.string();
    std::printf("%10ld %9ld %12s  %s\n", static_cast<long>(c.step), static_cast<long>(c.num_tensors),
                human_bytes(c.total_bytes).c_str(), last.c_str());
  }
  if (tensors) {
    std::printf("\ntensors of step %ld\n", static_cast<long>(all.front().step));
    for (const StoredTensor& t : list_tensors(all.front().path)) {
      std::printf("  %-56s %-5s %-20s %12s  %d piece%s\n", t.name.c_str(), t.dtype.c_str(),
                  str(t.shape).c_str(), human_bytes(t.bytes).c_str(), t.num_pieces,
                  t.num_pieces == 1 ? "" : "s");
    }
  }
  return good ? 0 : 1;
}

}  // namespace

void add_config_command(CLI::App& app, CommandAction& action) {
  CLI::App* command = app.add_subcommand("config", "Check and print a config, with the origin of each value");
  add_help(*command, "",
           "  shoal config exp.yaml optim.learning_rate=1e-3 --world 8\n"
           "  shoal config --explain model.moe.router\n"
           "  shoal config --schema > shoal.schema.json");
  auto a = std::make_shared<ConfigCommand>();
  command->add_option("file", a->file, "experiment file (YAML)");
  command->add_option("settings", a->settings, "key=value pairs that override the file");
  command->add_flag("--schema", a->schema, "print a JSON Schema of the config");
  command->add_option("--explain", a->explain,
                      "print only the documentation of one key, e.g. model.moe.router; default: the config");
  command->add_option("--world", a->world, "check the layout for this number of ranks; 0: do not")
      ->check(number_in(0, 1 << 20))
      ->capture_default_str();
  command->callback([=, &action] { action = [=] { return show_config(*command, *a); }; });
}

void add_inspect_command(CLI::App& app, CommandAction& action) {
  CLI::App* command = app.add_subcommand("inspect", "List checkpoints and their tensors, verify checksums");
  add_help(*command, "A damaged checkpoint is exit code 1.",
           "  shoal inspect runs/quickstart\n"
           "  shoal inspect runs/quickstart/checkpoints/step-000000200 --tensors");
  auto path = std::make_shared<std::string>();
  auto tensors = std::make_shared<bool>(false);
  auto quick = std::make_shared<bool>(false);
  command->add_option("checkpoint", *path, "a run folder, its checkpoints folder, or one checkpoint")
      ->required();
  command->add_flag("--tensors", *tensors, "list the tensors of the newest one");
  command->add_flag("--no-verify", *quick, "do not read the data");
  command->callback([=, &action] {
    action = [=] {
      refuse_extras(*command);
      return inspect(*path, *tensors, !*quick);
    };
  });
}

void add_report_command(CLI::App& app, CommandAction& action) {
  CLI::App* command = app.add_subcommand("report", "One HTML page about one or more runs");
  add_help(*command, "", "  shoal report runs/quickstart\n  shoal report runs/one runs/two -o compare.html");
  auto runs = std::make_shared<std::vector<std::string>>();
  auto output = std::make_shared<std::string>();
  command->add_option("runs", *runs, "run folders, or their metrics files")->required();
  command->add_option("-o,--output", *output, "HTML file; default: report.html in the first run's folder");
  command->callback([=, &action] {
    action = [=] {
      refuse_extras(*command);
      const std::filesystem::path first = runs->front();
      const std::filesystem::path folder = std::filesystem::is_directory(first) ? first : first.parent_path();
      const std::filesystem::path file =
          output->empty() ? folder / "report.html" : std::filesystem::path(*output);
      write_report(std::vector<std::filesystem::path>(runs->begin(), runs->end()), file);
      std::printf("report: %s\n", file.c_str());
      return 0;
    };
  });
}

}  // namespace shoal
