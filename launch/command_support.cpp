#include "launch/command_support.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "core/base/config_fields.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/ops/linear.h"
#include "core/tensor/kernel.h"
#include "launch/engine_options.h"
#include "launch/memory.h"
#include "launch/run_folder.h"
#include "parallel/bootstrap.h"
#include "parallel/device_world.h"

namespace shoal {

namespace {

[[noreturn]] void refuse_argument(const CLI::App& command, const std::string& given, const char* fix) {
  const std::string argument = given.substr(0, given.find('='));
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  throw UsageError(str("shoal ", command.get_name(), ": unknown argument '", argument, "'",
                       suggest(argument, known), fix, "; see shoal ", command.get_name(), " --help"));
}

/// "--model.layers=4" and "--model={...}" are settings, "--tokns=4" is a mistyped option.
bool is_setting(const std::string& argument) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) return false;
  const std::string name = argument.substr(0, equals);
  if (!name.starts_with('-') || name.find('.') != std::string::npos) return true;
  TrainConfig config;
  config.model.options = ModelRegistry::instance().make_options(config.model.kind);
  const auto sections = describe_fields([&](FieldVisitor& v) { config.fields(v); });
  return std::ranges::any_of(sections, [&](const FieldInfo& f) { return "--" + f.key == name; });
}

}  // namespace

std::vector<std::string> overrides_from(const CLI::App& command, const std::vector<std::string>& positional) {
  constexpr const char* kFix = "; settings are given as key=value";
  std::vector<std::string> overrides;
  auto take = [&](const std::string& argument) {
    if (!is_setting(argument)) refuse_argument(command, argument, kFix);
    overrides.push_back(argument);
  };
  // An unknown option before what may be its value: the option is the mistake.
  for (const std::string& argument : command.remaining()) {
    if (!is_setting(argument)) take(argument);
  }
  for (const std::string& argument : positional) take(argument);
  for (const std::string& argument : command.remaining()) take(argument);
  return overrides;
}

void refuse_extras(const CLI::App& command) {
  for (const std::string& argument : command.remaining()) refuse_argument(command, argument, "");
}

void add_help(CLI::App& command, const std::string& notes, const std::string& examples) {
  constexpr const char* kExitCodes =
      "Exit codes: 0 done, or saved on request; 1 failure at run time; 2 wrong command, config or input.";
  command.footer(str(notes, notes.empty() ? "" : "\n\n", "Examples:\n", examples, "\n\n", kExitCodes));
  command.allow_extras();  // what is not known is refused with a suggestion when the command runs
}

CLI::Validator number_in(double low, double high) {
  return CLI::Validator(
      [=](const std::string& text) {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        const bool whole = !text.empty() && *end == '\0';
        return whole && value >= low && value <= high ? std::string()
                                                      : str("expected a number from ", low, " to ",
                                                            static_cast<int64_t>(high), ", got '", text, "'");
      },
      "");
}

void check_kernel_choice() {
  // The first product chooses the engine.
  const Tensor one = Tensor::zeros({1, 1}, DType::f32);
  gemm(Device{}, Gemm{}, one, one, Tensor::zeros({1, 1}, DType::f32));
  const char* wanted = std::getenv("SHOAL_CPU_ISA");
  const std::string chosen = cpu_isa_name(cpu_isa());
  if (wanted == nullptr || *wanted == '\0' || chosen == wanted) return;
  throw UsageError(str("SHOAL_CPU_ISA: expected scalar | avx2 | avx512 | avx512_bf16 and at most ", chosen,
                       ", the best of this CPU, got '", wanted, "'; unset it"));
}

void apply_threads(const TrainConfig& config) {
  cpu_set_t cores;
  int usable = 1;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) usable = CPU_COUNT(&cores);
  const int local = std::max(1, launch_info().local_size);
  const auto threads = static_cast<int>(config.run.threads.value_or(std::max(1, usable / local)));
  if (threads > usable)
    log::warn("run.threads is ", threads, " but this process has ", usable,
              " cores: threads that share a core wait for each other");
  set_num_threads(threads);
}

namespace {

const Choice kIdleOptimizer{"sgd", nullptr};

/// Evaluation and generation have no global batch and update nothing, so any number of ranks will do.
void free_batch(LoadedConfig& loaded, int world_size, bool shares_sequences) {
  TrainConfig& config = loaded.config;
  config.optim.optimizer = kIdleOptimizer;
  ParallelOptions& parallel = config.parallel;  // where the training's degrees do not fit
  parallel.pipeline = {};
  if (world_size % std::max<int64_t>(1, parallel.ranks_per_node.value_or(1)) != 0)
    parallel.ranks_per_node = {};
  if (world_size % (parallel.tp * parallel.pp) != 0) parallel.pp = 1;
  if (world_size % parallel.tp != 0) parallel.tp = 1;
  if (world_size % (parallel.etp * parallel.ep.value_or(1) * parallel.pp) != 0) parallel.etp = 1;
  if (!shares_sequences || world_size % (parallel.tp * parallel.cp * parallel.pp) != 0) parallel.cp = 1;
  const int64_t micro_batch =
      config.data.micro_batch.value_or(std::max<int64_t>(1, config.data.global_batch / world_size));
  config.data.micro_batch.value = micro_batch;
  config.data.global_batch = micro_batch * world_size;
  ConfigErrors errors;
  resolve_layout(config.parallel, layout_facts(config, world_size), loaded.tree, errors);
  errors.throw_if_any();
}

}  // namespace

void refuse_idle_overrides(const std::string& command, const std::vector<std::string>& overrides,
                           const std::vector<std::string>& used) {
  if (overrides.empty()) return;
  ConfigErrors errors;
  ConfigNode tree;
  for (const std::string& assignment : overrides) apply_override(tree, assignment, errors);
  if (!errors.empty()) return;  // reported with the rest of the config
  std::vector<std::string> idle;
  for (const auto& [key, value] : flat_settings(tree)) {
    const auto covers = [&, &key = key](const std::string& prefix) {
      return (key + ".").starts_with(prefix + ".");
    };
    if (std::ranges::none_of(used, covers)) idle.push_back(key);
  }
  if (!idle.empty())
    throw UsageError(str("shoal ", command, ": ", join(idle, ", "), idle.size() == 1 ? " has" : " have",
                         " no effect here; keys that have: ", join(used, ", ")));
}

TrainedRun open_run(const std::string& run, const std::vector<std::string>& given, int world_size,
                    const RunUse& use) {
  namespace fs = std::filesystem;
  TrainedRun out;
  // Checkpoints load under any layout; neither the training's layout nor its batch need fit this number of
  // ranks.
  constexpr int kSequencesPerPass = 4;
  std::vector<std::string> overrides = {
      "parallel.dp=auto", "parallel.ep=auto", "data.micro_batch=auto",
      str("data.global_batch=", kSequencesPerPass * std::max(1, world_size))};
  overrides.insert(overrides.end(), given.begin(), given.end());
  if (!fs::exists(run)) {
    throw UsageError(
        str("run '", run, "': no such folder or config file; runs are stored in <run.folder>/<run.name>"));
  }
  if (fs::is_directory(run)) {
    out.folder = fs::path(run).lexically_normal().string();
    if (out.folder.ends_with('/')) out.folder.pop_back();
    const std::string config = out.folder + "/config.yaml";
    if (fs::exists(config)) {
      out.loaded = load_train_config(config, overrides, 0);
    } else {
      const auto stored = stored_config(out.folder);
      if (!stored) {
        throw UsageError(str("run '", run,
                             "': there is no config.yaml in it, nor a checkpoint that holds one; ",
                             "is this the folder of a training run?"));
      }
      log::warn("run '", run, "': there is no config.yaml in it; ", stored->file.string(), " is used");
      out.loaded = load_train_config_text(stored->yaml, stored->file.string(), overrides, 0);
    }
    refuse_idle_overrides(use.command, given, use.keys);
  } else {
    out.loaded = load_train_config(run, overrides, 0);
    std::vector<std::string> keys = use.keys;
    keys.insert(keys.end(), {"run.name", "run.folder"});  // they say which run
    refuse_idle_overrides(use.command, given, keys);
    out.folder = out.loaded.config.run_folder();
  }
  free_batch(out.loaded, world_size, use.shares_sequences);
  return out;
}

std::unique_ptr<Tokenizer> open_tokenizer(const TrainedRun& run) {
  const std::string own = run_tokenizer_path(run.folder);
  return std::filesystem::exists(own) ? load_tokenizer(own) : open_tokenizer(run.loaded.config);
}

TrainedModel load_trained_model(const TrainedRun& run, int64_t vocab_size, std::optional<int64_t> step,
                                const std::shared_ptr<Communicator>& world) {
  const TrainConfig& config = run.loaded.config;
  CheckpointStore store(
      CheckpointOptions{std::filesystem::path(run.folder) / "checkpoints", 0, 0, read_run_id(run.folder),
                        /*read_only=*/true},
      *world);
  const std::optional<LoadedCheckpoint> found = store.find(step);
  if (!found)
    throw UsageError(str("run '", run.folder, "': it has no checkpoint yet; train it first (`shoal train`)"));
  // The engine has gradients even where they are not used.
  MemoryEstimate memory = estimate_memory(config, layout_of(config, world->size()), vocab_size);
  memory.activations = memory.work = 0;  // without backward next to none are kept
  require_memory(run.loaded, memory, *world);
  TrainedModel out;
  out.step = found->step;
  out.mesh = std::make_unique<Mesh>(device_world(world, device_of(config)), layout_of(config, world->size()));
  out.engine = std::make_unique<TrainEngine>(engine_options(config, vocab_size), *out.mesh);
  std::vector<StateTensor> weights = out.engine->state();
  std::erase_if(weights, [](const StateTensor& t) { return t.name.starts_with("optim/"); });
  store.load(*found, weights, /*allow_extra=*/true);
  return out;
}

}  // namespace shoal
