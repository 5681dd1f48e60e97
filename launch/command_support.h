// What the commands that need ranks or a config share.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/trainer.h"

namespace shoal {

/// "key=value" and "--key=value" arguments that CLI11 left over; anything else is a UsageError with the
/// nearest option.
std::vector<std::string> overrides_from(const CLI::App& command, const std::vector<std::string>& positional);

/// UsageError with the nearest option when CLI11 left anything over, for commands without settings.
void refuse_extras(const CLI::App& command);
/// The end of `--help`: notes ("" for none), examples (one or more lines), exit codes.
void add_help(CLI::App& command, const std::string& notes, const std::string& examples);

/// A check for a command-line option: a finite number from `low` to `high`.
CLI::Validator number_in(double low, double high);

/// UsageError when SHOAL_CPU_ISA names kernels, or SHOAL_GEMM an engine, that this CPU or this program does
/// not have. The kernels themselves are chosen before main, where nothing can be reported.
void check_kernel_choice();

/// Threads per rank: run.threads, or the cores of this host divided by its ranks.
void apply_threads(const TrainConfig& config);

/// The config of a trained run: from the checkpoint it will be loaded from, with overrides. `run` is a run
/// folder, or a config file whose run folder is meant. The layout is the automatic one, unless overridden.
struct TrainedRun {
  LoadedConfig loaded;
  std::string folder;
};
/// Which keys a command makes use of; overrides of others are a UsageError. Sections stand for all their
/// keys.
struct RunUse {
  std::string command;
  std::vector<std::string> keys;
  bool shares_sequences = false;  // context parallel ranks work together; else each has whole sequences
};
/// `world_size` >= 1.
TrainedRun open_run(const std::string& run, const std::vector<std::string>& overrides, int world_size,
                    const RunUse& use);
/// UsageError naming the keys of `overrides` that are not in `used`.
void refuse_idle_overrides(const std::string& command, const std::vector<std::string>& overrides,
                           const std::vector<std::string>& used);

/// The tokenizer that the run was trained with: a copy in its folder, else the one of the prepared data.
std::unique_ptr<Tokenizer> open_tokenizer(const TrainedRun& run);

/// A model with the weights of a run's newest good checkpoint, or of `step`. Collective.
struct TrainedModel {
  std::unique_ptr<Mesh> mesh;
  std::unique_ptr<TrainEngine> engine;
  int64_t step = 0;
};
TrainedModel load_trained_model(const TrainedRun& run, int64_t vocab_size, std::optional<int64_t> step,
                                const std::shared_ptr<Communicator>& world);

}  // namespace shoal
