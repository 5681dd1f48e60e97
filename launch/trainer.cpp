#include "launch/trainer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/base/threads.h"
#include "launch/ceilings.h"
#include "launch/checkpoint_agreement.h"
#include "launch/console.h"
#include "launch/engine_options.h"
#include "launch/finite.h"
#include "launch/memory.h"
#include "launch/replica_check.h"
#include "launch/run_folder.h"
#include "launch/stop_signals.h"
#include "parallel/bootstrap.h"
#include "parallel/device_world.h"

namespace shoal {

Trainer::Trainer(LoadedConfig loaded, std::shared_ptr<Communicator> world)
    : loaded_(std::move(loaded)),
      config_(loaded_.config),
      world_(std::move(world)),
      metrics_(std::filesystem::path(config_.run_folder()) / "metrics.jsonl"),
      table_(step_table_options(config_, log::terminal_columns())) {
  require_memory(loaded_, *world_);
  lock_folder();
  build();
  restore();
}

Trainer::~Trainer() {
  log::status("");  // an error message may follow
}

void Trainer::lock_folder() {
  const std::string folder = config_.run_folder();
  const Tensor taken = Tensor::zeros({1}, DType::u8);
  if (world_->rank() == 0) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) {
      throw UsageError(str("run folder ", folder, ": cannot be created: ", error.message(),
                           "; set run.folder to a folder that you may write to"));
    }
    require_file_or_nothing(folder + "/metrics.jsonl");
    lock_ = FileLock::try_lock(folder + "/.lock");
    *taken.data<uint8_t>() = lock_ ? 0 : 1;
  }
  world_->broadcast(taken, 0).wait();
  if (*taken.data<uint8_t>() != 0) {
    throw UsageError(str("run ", folder, ": another training runs in this folder (it holds ", folder,
                         "/.lock); wait for it, stop it, or choose another run.name"));
  }
}

void Trainer::build() {
  device_ = open_device(config_);
  const ParallelLayout layout = layout_of(config_, world_->size());
  data_ = open_data(config_, loaded_.tree, *world_);
  require_memory(loaded_, estimate_memory(config_, layout, data_.vocab_size), *world_);
  mesh_ = std::make_unique<Mesh>(device_world(world_, device_), layout);
  micro_batch_ = micro_batch_of(config_, layout);
  num_micro_batches_ = config_.data.global_batch / (micro_batch_ * layout.dp);

  engine_ = std::make_unique<TrainEngine>(engine_options(config_, data_.vocab_size), *mesh_);
  schedule_ = ScheduleRegistry::make(config_.optim.schedule,
                                     ScheduleContext{config_.optim.learning_rate, config_.run.steps});
  run_id_ = run_on_first(*world_, [&] { return read_run_id(config_.run_folder()); });
  checkpoints_ = std::make_unique<CheckpointStore>(
      CheckpointOptions{std::filesystem::path(config_.run_folder()) / "checkpoints",
                        config_.checkpoint.keep_last, config_.checkpoint.keep_every, run_id_,
                        /*read_only=*/false},
      *world_);
}

void Trainer::check_resumed_config(const LoadedCheckpoint& found) {
  const ConfigChanges changes = compare_configs(found.config_yaml, to_yaml(config_));
  if (world_->rank() == 0) {
    for (const std::string& change : changes.harmless) log::info("  changed since the checkpoint: ", change);
  }
  if (changes.meaningful.empty()) return;
  const std::string list = join(changes.meaningful, "\n  ");
  if (!config_.run.allow_config_change) {
    throw UsageError(str("resume from ", found.path.string(), ": settings that change the result differ:\n  ",
                         list,
                         "\nrestore them, choose another run.name, or set run.allow_config_change: true"));
  }
  if (world_->rank() == 0)
    log::warn("settings that change the result differ from the checkpoint's:\n  ", list);
}

void Trainer::restore() {
  const std::string folder = config_.run_folder() + "/checkpoints";
  const std::optional<LoadedCheckpoint> found = checkpoints_->find();
  if (run_id_.empty() && found) run_id_ = found->run_id;
  if (run_id_.empty()) run_id_ = run_on_first(*world_, new_run_id);
  checkpoints_->set_run_id(run_id_);
  if (!found) {
    if (config_.run.resume == "required") {
      throw UsageError(
          str("run.resume is required but ", folder, " holds no checkpoint; check run.folder and run.name"));
    }
    progress_.data_fingerprint = data_.train->fingerprint();
    return;
  }
  if (config_.run.resume == "never") {
    throw UsageError(str("run.resume is never but ", folder, " holds a checkpoint of step ", found->step,
                         "; choose another run.name or remove the folder"));
  }
  if (world_->rank() == 0) log::info("resume     ", found->path.string(), " (step ", found->step, ")");
  check_resumed_config(*found);
  checkpoints_->load(*found, engine_->state(), config_.run.allow_config_change);
  progress_ = Progress::from_json(found->state_json);
  const uint64_t data_now = data_.train->fingerprint();
  if (progress_.data_fingerprint != data_now) {
    const std::string what =
        str("the training data (text, tokenizer, data.seq_len, split, order) is not what it was "
            "(fingerprint ",
            progress_.data_fingerprint, ", now ", data_now, ")");
    if (!config_.run.allow_config_change)
      throw UsageError(str("resume from ", found->path.string(), ": ", what,
                           "; restore the text and the settings, delete ", config_.data.prepared,
                           " if its files were changed, or set run.allow_config_change: true"));
    if (world_->rank() == 0) log::warn(what);
    progress_.data_fingerprint = data_now;  // accepted once
  }
  engine_->optimizer().set_num_steps(progress_.optimizer_steps);
  last_saved_ = progress_.step;
}

std::vector<ModelBatch> Trainer::next_micro_batches() {
  std::vector<ModelBatch> batches;
  for (int64_t i = 0; i < num_micro_batches_; i++) {
    Batch batch = prefetch_->next();
    batches.push_back(
        to_model_batch(batch, config_.data.loader.mask_documents, mesh_->coords()[Axis::cp], device_));
    prefetch_->recycle(std::move(batch));
  }
  return batches;
}

void Trainer::note_update(const StepResult& result) {
  if (result.updated) {
    not_finite_in_a_row_ = 0;
    return;
  }
  progress_.skipped++;
  not_finite_in_a_row_ += result.labels > 0;
  const auto skipped = static_cast<uint64_t>(progress_.skipped);
  if (skipped > 8 && !std::has_single_bit(skipped)) return;
  const std::string why =
      result.labels == 0 ? "the step has no labels" : where_not_finite(*engine_, result.own_loss_finite);
  if (world_->rank() == 0)
    log::warn("step ", progress_.step, ": no update, ", why, " (", progress_.skipped, " skipped so far)");
}

StepMetrics Trainer::train_step(int64_t step, bool stop_signal, bool& stop_requested) {
  const double begin = now_seconds();
  const std::vector<ModelBatch> batches = [&] {
    const ProfileSection section("data", ProfileSection::kWhole);
    return next_micro_batches();
  }();
  StepMetrics metrics;
  metrics.step = step;
  metrics.learning_rate = schedule_->at(step);
  const Traffic sent_before = mesh_->world().traffic().ledger();
  const StepResult result = engine_->step(batches, metrics.learning_rate, stop_signal);
  metrics.traffic = bytes_of_groups(mesh_->world().traffic().ledger() - sent_before);
  stop_requested = result.stop_requested;

  progress_.step = step;
  progress_.tokens += config_.data.global_batch * config_.data.seq_len;
  progress_.samples += config_.data.global_batch;
  progress_.optimizer_steps = engine_->optimizer().num_steps();
  note_update(result);
  metrics.tokens = progress_.tokens;
  metrics.skipped = progress_.skipped;
  metrics.loss = result.loss;
  metrics.aux_loss = result.aux_loss;
  metrics.z_loss = result.z_loss;
  metrics.grad_norm = result.grad_norm;
  int64_t dropped = 0, assigned = 0;
  for (const MoeStepStats& stats : result.moe) {
    LayerMetrics layer;
    layer.layer = stats.layer;
    layer.counts = stats.counts_E;
    int64_t total = 0, largest = 0;
    for (const int64_t count : stats.counts_E) {
      total += count;
      largest = std::max(largest, count);
      layer.dead += count == 0;
    }
    const double mean = static_cast<double>(total) / static_cast<double>(stats.counts_E.size());
    const double load = mean > 0 ? static_cast<double>(largest) / mean : 0;
    layer.max_vio = load - 1;
    layer.entropy = stats.entropy;
    layer.dropped = total > 0 ? static_cast<double>(stats.dropped) / static_cast<double>(total) : 0;
    layer.bias_min = stats.bias_min;
    layer.bias_max = stats.bias_max;
    dropped += stats.dropped;
    assigned += total;
    metrics.max_load = std::max(metrics.max_load, load);
    metrics.layers.push_back(std::move(layer));
  }
  metrics.dropped = assigned > 0 ? static_cast<double>(dropped) / static_cast<double>(assigned) : 0;

  const double seconds = now_seconds() - begin;
  seconds_in_steps_ += seconds;
  tokens_in_steps_ += config_.data.global_batch * config_.data.seq_len;
  steps_timed_++;
  // The first step also touches memory; it would spoil the estimate.
  mean_step_seconds_ =
      mean_step_seconds_ == 0 || steps_timed_ <= 2 ? seconds : 0.95 * mean_step_seconds_ + 0.05 * seconds;
  return metrics;
}

void Trainer::log_step(const StepMetrics& step) {
  const ProfileSection section("log", ProfileSection::kWhole);
  StepMetrics m = step;
  m.tokens_per_s = static_cast<double>(tokens_in_steps_) / seconds_in_steps_;
  m.step_ms = 1000 * seconds_in_steps_ /
              std::max<double>(1, static_cast<double>(tokens_in_steps_) /
                                      static_cast<double>(config_.data.global_batch * config_.data.seq_len));
  const double flops = engine_->model().facts().flops_per_token() * m.tokens_per_s;
  m.tflops = flops / 1e12;
  // On a shared machine the measurement at the start may have been disturbed.
  peak_flops_ = std::max(peak_flops_, flops);
  if (!peak_raised_ && peak_flops_ > 1.02 * measured_peak_flops_) {
    peak_raised_ = true;
    if (world_->rank() == 0) {
      log::info("the GEMM peak measured at start (", measured_peak_flops_ / 1e12,
                " TFLOP/s) was disturbed: MFU now counts against the best steps");
    }
  }
  m.mfu = peak_flops_ > 0 ? flops / peak_flops_ : 0;
  m.peak_bytes = device_runtime(device_.type).stats().peak_bytes;
  seconds_in_steps_ = 0;
  tokens_in_steps_ = 0;
  if (world_->rank() != 0) return;
  metrics_.write(m);
  if (lines_++ % 25 == 0) log::info(table_.header());
  log::info(table_.line(m, eta_seconds()));
}

double Trainer::eta_seconds() const {
  if (steps_timed_ < 2) return std::numeric_limits<double>::quiet_NaN();  // the first step tells nothing
  return static_cast<double>(config_.run.steps - progress_.step) * mean_step_seconds_;
}

void Trainer::show_status() {
  constexpr double kSecondsBetween = 0.1;
  const double now = now_seconds();
  if (world_->rank() != 0 || now - status_seconds_ < kSecondsBetween) return;
  status_seconds_ = now;
  const auto tokens = static_cast<double>(config_.data.global_batch * config_.data.seq_len);
  log::status(table_.status(progress_.step, tokens / mean_step_seconds_, eta_seconds()));
}

EvalMetrics Trainer::evaluate() {
  const ProfileSection section("evaluation", ProfileSection::kWhole);
  log::status(str("evaluating after step ", progress_.step));
  return evaluate_model(*engine_, data_, config_, progress_.step);
}

void Trainer::log_evaluation(const EvalMetrics& metrics) {
  if (world_->rank() != 0) return;
  metrics_.write(metrics);
  log::info(eval_line(metrics));
}

void Trainer::check_replicas_if_due() {
  const int64_t step = progress_.step;
  if (config_.run.check_replicas == 0 || step % config_.run.check_replicas != 0) return;
  const ProfileSection section("replica check", ProfileSection::kWhole);
  const std::string problem = replica_problem(engine_->state(), *world_);
  if (problem.empty()) return;
  throw Error(str("replicas differ after step ", step, ": ", problem, "; expected the same bits (",
                  newest_checkpoint(),
                  "; start again from there without the rank's device or host, or with other ranks)"));
}

void Trainer::evaluate_if_due() {
  const int64_t step = progress_.step;
  const bool last = step == config_.run.steps;
  const bool due = config_.eval.every > 0 && step > 0 && step % config_.eval.every == 0;
  if (!data_.validation || !(due || (last && config_.eval.at_end))) return;
  const EvalMetrics metrics = evaluate();
  log_evaluation(metrics);
  if (last && metrics.tokens > 0 && !std::isfinite(metrics.loss))
    diverged_ = str("the validation loss of step ", step, " is not finite");
}

// Weights whose first use gave no finite loss must not push out older checkpoints: a save that is due waits
// for a step with finite numbers.
void Trainer::save_if_due(bool stop) {
  const int64_t step = progress_.step;
  const bool last = step == config_.run.steps;
  const bool due = config_.checkpoint.every > 0 && step > 0 && step % config_.checkpoint.every == 0;
  save_due_ |= due || (last && config_.checkpoint.at_end) || stop;
  if (!save_due_) return;
  if (not_finite_in_a_row_ == 0) {
    save_due_ = false;
    save();
  } else if (stop) {
    save_failed_ = true;
    if (world_->rank() == 0)
      log::warn("checkpoint of step ", step, " was not saved: the step had no finite loss and gradient");
  }
}

void Trainer::save() {
  if (last_saved_ == progress_.step) return;
  const ProfileSection section("checkpoint", ProfileSection::kWhole);
  if (const std::string bad = first_not_finite(engine_->state(), *world_); !bad.empty()) {
    diverged_ = str("after step ", progress_.step, " ", bad, " is not finite");
    return;
  }
  const double begin = now_seconds();
  log::status(str("saving the checkpoint of step ", progress_.step));
  const std::string problem =
      checkpoints_->save(progress_.step, engine_->state(), progress_.to_json(), to_yaml(config_));
  save_failed_ = !problem.empty();
  if (world_->rank() != 0) {
    if (problem.empty()) last_saved_ = progress_.step;
    return;
  }
  if (problem.empty()) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.2f s", now_seconds() - begin);
    log::info("  checkpoint of step ", progress_.step, " saved (", seconds, ")");
    last_saved_ = progress_.step;
  } else {
    log::warn("checkpoint of step ", progress_.step, " was not saved: ", problem);
  }
}

void Trainer::print_summary() const {
  if (world_->rank() != 0) return;
  log::info(run_summary(config_, *engine_, data_, peak_flops_, progress_.step));
}

void Trainer::start_profile() {
  if (config_.run.profile == 0) return;
  ProfileOptions options;
  options.after = config_.run.profile_after;
  options.steps = config_.run.profile;
  options.folder = std::filesystem::path(config_.run_folder()) / "profile";
  options.title = config_.run.name;
  options.tokens_per_step = static_cast<double>(config_.data.global_batch * config_.data.seq_len);
  options.model_flops_per_token = engine_->model().facts().flops_per_token();
  profile_ = std::make_unique<StepProfile>(options, measure_ceilings(config_.run.dtype(), *world_), *mesh_);
}

// Rows without a checkpoint: it was never saved, or it was lost. Training cannot but begin anew, but says so.
void Trainer::keep_old_metrics() const {
  const std::filesystem::path file = std::filesystem::path(config_.run_folder()) / "metrics.jsonl";
  const std::string result = run_result(file, std::numeric_limits<int64_t>::max());
  if (result.empty()) return;
  const std::filesystem::path kept = file.string() + ".old";
  std::error_code error;
  std::filesystem::rename(file, kept, error);
  log::warn("run ", config_.run_folder(),
            ": training begins at step 0, because there is no checkpoint; rows of ", "an earlier start are ",
            error ? "lost: " + error.message() : "kept in " + kept.string());
}

TrainEnd Trainer::run() {
  const int64_t steps = config_.run.steps;
  if (progress_.step >= steps && last_saved_ >= 0) {
    if (world_->rank() == 0) {
      log::info("run        ", config_.run_folder(), " is at step ", progress_.step, " and run.steps is ",
                steps, ": nothing to do");
      const std::string result =
          run_result(std::filesystem::path(config_.run_folder()) / "metrics.jsonl", progress_.step);
      if (!result.empty()) log::info(result);
    }
    return TrainEnd::already_done;
  }
  peak_flops_ = measured_peak_flops_ = world_->sum(
      measure_gemm_flops(device_, config_.run.bf16() ? DType::bf16 : config_.run.dtype(), *world_));
  if (world_->rank() == 0) {
    std::filesystem::create_directories(config_.run_folder());
    for (const char* name : {"/metrics.jsonl", "/config.yaml", "/tokenizer.json", "/run-id"})
      AtomicFile::remove_leftovers(config_.run_folder() + name);
    if (last_saved_ < 0) keep_old_metrics();
    metrics_.begin(last_saved_);
    write_run_id(config_.run_folder(), run_id_);
    if (last_saved_ < 0) metrics_.write_run(run_record(config_, *engine_, world_->size()));
    write_resolved_config(config_);
    save_tokenizer(*data_.tokenizer, run_tokenizer_path(config_.run_folder()));
  }
  print_summary();
  start_profile();
  device_runtime(device_.type).reset_peak();

  first_step_ = progress_.step + 1;
  start_seconds_ = now_seconds();
  const int64_t dp_index = mesh_->coords()[Axis::dp].index;
  const int64_t per_rank = micro_batch_ * num_micro_batches_, global = config_.data.global_batch;
  const int64_t done_samples = progress_.samples, micro = micro_batch_, per_step = num_micro_batches_;
  prefetch_ = std::make_unique<PrefetchingLoader>(data_.train, [=](int64_t call) {
    const int64_t first =
        done_samples + call / per_step * global + dp_index * per_rank + call % per_step * micro;
    return PrefetchingLoader::Range{first, micro};
  });

  bool stop = false;
  if (steps == 0) {
    evaluate_if_due();
    if (diverged_.empty()) save_if_due(false);
  }
  for (int64_t step = first_step_; step <= steps && !stop && diverged_.empty(); step++) {
    if (profile_) profile_->begin_step(step);
    const StepMetrics metrics = train_step(step, stop_signal_seen(), stop);
    const bool last = step == steps;
    if (not_finite_in_a_row_ >= kMaxSkippedInARow || (last && not_finite_in_a_row_ > 0)) {
      diverged_ = not_finite_in_a_row_ == 1
                      ? std::string("the last step had no finite loss and gradient")
                      : str("no finite loss and gradient in the last ", not_finite_in_a_row_, " steps");
    }
    if (step % config_.run.log_every == 0 || step == 1 || last || stop || !diverged_.empty())
      log_step(metrics);
    show_status();
    check_replicas_if_due();
    if (diverged_.empty()) evaluate_if_due();
    if (diverged_.empty()) save_if_due(stop);
    if (profile_) profile_->end_step();
  }
  prefetch_.reset();
  if (profile_) profile_->finish();
  return finish(stop && progress_.step < steps);
}

std::string Trainer::newest_checkpoint() const {
  return last_saved_ < 0 ? "there is no earlier checkpoint"
                         : str("the newest checkpoint is of step ", last_saved_);
}

TrainEnd Trainer::finish(bool stopped) {
  if (diverged_.empty() && !stopped) {
    if (const std::string bad = first_not_finite(engine_->state(), *world_); !bad.empty())
      diverged_ = str("after the last step ", bad, " is not finite");
  }
  const bool speaks = world_->rank() == 0;
  if (!diverged_.empty()) {
    if (speaks) {
      log::warn("training diverged: ", diverged_, "; ", newest_checkpoint(),
                "; lower optim.learning_rate or go on from an older checkpoint");
    }
    return TrainEnd::diverged;
  }
  if (stopped && speaks && !save_failed_)
    log::info("stopped on request after step ", progress_.step, "; start the same command to go on");
  const Tensor peak =
      Tensor::from(std::vector<int64_t>{device_runtime(device_.type).stats().peak_bytes}, {1});
  if (!stopped) world_->all_reduce(peak, ReduceOp::max).wait();
  if (!stopped && speaks) {
    const std::string result =
        run_result(std::filesystem::path(config_.run_folder()) / "metrics.jsonl", progress_.step);
    if (!result.empty()) log::info("\n", result);
    const MemoryUse memory{peak.to_vector<int64_t>()[0],
                           estimate_memory(config_, mesh_->layout(), data_.vocab_size)};
    log::info(run_end(config_, first_step_, progress_.step, now_seconds() - start_seconds_, memory,
                      last_saved_ >= 0));
  }
  if (save_failed_) {
    if (speaks) {
      log::warn("training ended at step ", progress_.step, " without its checkpoint; ", newest_checkpoint(),
                "; free space or fix the folder and start the same command again");
    }
    return TrainEnd::not_saved;
  }
  return stopped ? TrainEnd::stopped : TrainEnd::done;
}

}  // namespace shoal
