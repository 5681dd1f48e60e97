// Trainer: the run around TrainEngine: data, checkpoints, evaluation, log, signals. One instance per rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/file_io.h"
#include "data/prefetching_loader.h"
#include "data/tokenizer.h"
#include "launch/checkpoint.h"
#include "launch/engine.h"
#include "launch/metrics.h"
#include "launch/profile.h"
#include "launch/step_table.h"
#include "launch/train_config.h"
#include "optim/schedule.h"

namespace shoal {

/// Tokenizer and datasets of a config. Rank 0 prepares text that is not prepared yet, with a progress line;
/// the other ranks sleep meanwhile. Throws StopRequested on all ranks when one has seen a stop signal.
/// Collective.
struct TrainData {
  std::unique_ptr<Tokenizer> tokenizer;
  std::shared_ptr<const BatchLoader> train, validation;  // validation: null without held-out data
  int64_t vocab_size = 0;
};
TrainData open_data(const TrainConfig& config, const ConfigNode& tree, Communicator& world);
/// Where a run keeps a copy of its tokenizer: prepared data may be removed, or prepared anew by another run.
std::string run_tokenizer_path(const std::string& run_folder);
/// The tokenizer of a prepared config, without datasets. Throws UsageError when nothing is prepared yet.
std::unique_ptr<Tokenizer> open_tokenizer(const TrainConfig& config);

/// Loss on the held-out data of a config: the first eval.samples windows, always the same ones. Collective;
/// leaves no trace in the model. Memory does not grow with the number of samples.
EvalMetrics evaluate_model(TrainEngine& engine, const TrainData& data, const TrainConfig& config,
                           int64_t step);

/// How a training ended. not_saved: with the last step, or on request, but its checkpoint could not be
/// written. diverged: kMaxSkippedInARow steps one after the other, or the last one, had no finite loss and
/// gradient, or the weights or the last validation loss are not finite.
enum class TrainEnd { done, already_done, stopped, not_saved, diverged };
constexpr int64_t kMaxSkippedInARow = 100;

/// What must be remembered between runs besides tensors; stored as JSON in the checkpoint.
struct Progress {
  int64_t step = 0;     // optimizer steps asked for so far, skipped ones included
  int64_t tokens = 0;   // consumed
  int64_t samples = 0;  // consumed: the data position
  int64_t skipped = 0;  // steps without an update: not finite, or no labels
  int64_t optimizer_steps = 0;
  uint64_t data_fingerprint = 0;
  std::string to_json() const;
  static Progress from_json(const std::string& json);
};

class Trainer {
 public:
  /// Builds everything and restores the newest checkpoint. UsageError while another training runs in the same
  /// folder; StopRequested as open_data. Collective over the world.
  Trainer(LoadedConfig loaded, std::shared_ptr<Communicator> world);
  ~Trainer();

  /// Trains to the configured number of steps. Collective.
  TrainEnd run();
  /// Loss on the held-out data. Collective. Changes nothing about training.
  EvalMetrics evaluate();

  TrainEngine& engine() { return *engine_; }
  const Tokenizer& tokenizer() const { return *data_.tokenizer; }
  const TrainConfig& config() const { return config_; }
  const Progress& progress() const { return progress_; }
  CheckpointStore& checkpoints() { return *checkpoints_; }

 private:
  void lock_folder();
  void build();
  void keep_old_metrics() const;
  void print_summary() const;
  void start_profile();
  void restore();
  void check_resumed_config(const LoadedCheckpoint& found);
  StepMetrics train_step(int64_t step, bool stop_signal, bool& stop_requested);
  std::vector<ModelBatch> next_micro_batches();
  void note_update(const StepResult& result);
  void log_step(const StepMetrics& metrics);
  void show_status();
  double eta_seconds() const;
  void log_evaluation(const EvalMetrics& metrics);
  void check_replicas_if_due();
  void evaluate_if_due();
  void save_if_due(bool stop);
  void save();
  std::string newest_checkpoint() const;
  TrainEnd finish(bool stopped);

  LoadedConfig loaded_;
  TrainConfig& config_;
  std::shared_ptr<Communicator> world_;
  std::unique_ptr<FileLock> lock_;  // rank 0: of the run folder
  TrainData data_;
  Device device_;
  std::unique_ptr<Mesh> mesh_;
  std::unique_ptr<TrainEngine> engine_;
  std::unique_ptr<Schedule> schedule_;
  std::unique_ptr<CheckpointStore> checkpoints_;
  std::unique_ptr<PrefetchingLoader> prefetch_;
  std::unique_ptr<StepProfile> profile_;  // null: off
  MetricsWriter metrics_;
  Progress progress_;
  std::string run_id_;  // see run_folder.h
  int64_t micro_batch_ = 1, num_micro_batches_ = 1;
  int64_t last_saved_ = -1, lines_ = 0;
  int64_t not_finite_in_a_row_ = 0;  // steps; none of them is followed by a save
  bool save_due_ = false;            // put off until a step is finite
  bool save_failed_ = false;         // the newest attempt
  std::string diverged_;             // why the training cannot go on; the same on every rank
  double peak_flops_ = 0;            // measured GEMM rate of all ranks together
  double seconds_in_steps_ = 0;      // since the last log line, evaluation and saving excluded
  int64_t tokens_in_steps_ = 0, steps_timed_ = 0;
  double mean_step_seconds_ = 0;  // for the ETA
  StepTable table_;
  double measured_peak_flops_ = 0;                 // at start; peak_flops_ follows the best steps
  bool peak_raised_ = false;                       // and this has been said
  double start_seconds_ = 0, status_seconds_ = 0;  // when training began and the status line was last shown
  int64_t first_step_ = 1;
};

}  // namespace shoal
