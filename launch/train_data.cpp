// open_data: from the `data` section to loaders.
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "core/base/log.h"
#include "core/base/text.h"
#include "launch/stop_signals.h"
#include "launch/trainer.h"

namespace shoal {

namespace {

constexpr auto kReportTime = std::chrono::minutes(10);  // between lines about a long wait

/// Rank 0 works, the others sleep: a rank that waits inside a collective would take a core from it. Without a
/// time limit, because large data takes hours. A stop signal on rank 0 ends the work through StopRequested;
/// one on another rank counts when the work is done.
template <class F>
void on_rank_zero(Communicator& world, const F& work) {
  const Tensor stopped = Tensor::zeros({1}, DType::u8);
  if (world.rank() == 0) {
    try {
      work();
    } catch (const StopRequested&) {
      *stopped.data<uint8_t>() = 1;
    }
  }
  Work done = world.broadcast(stopped, 0);
  auto reported = std::chrono::steady_clock::now();
  while (!done.test()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (world.rank() != 1 || std::chrono::steady_clock::now() - reported < kReportTime) continue;
    reported += kReportTime;
    log::warn("still waiting for rank 0 to prepare the data");
  }
  done.wait();
  if (!world.all_true(*stopped.data<uint8_t>() == 0 && !stop_signal_seen())) throw StopRequested();
}

void prepare_with_progress(const PrepareOptions& options) {
  auto last = std::chrono::steady_clock::now() - std::chrono::hours(1);
  const PrepareReport report = prepare_dataset(options, [&](const PrepareProgress& p) {
    if (stop_signal_seen()) throw StopRequested();
    const auto now = std::chrono::steady_clock::now();
    if (now - last < std::chrono::milliseconds(100)) return;
    last = now;
    constexpr int kWidth = 30;
    const double share =
        p.total_bytes > 0 ? static_cast<double>(p.done_bytes) / static_cast<double>(p.total_bytes) : 0;
    const auto filled = static_cast<size_t>(share * kWidth);
    char percent[32];
    std::snprintf(percent, sizeof percent, "%3.0f %%", 100 * share);
    log::status(
        str("[", std::string(filled, '#'), std::string(kWidth - filled, '.'), "] ", percent, "  ", p.phase));
  });
  log::status("");
  if (report.up_to_date) {
    log::info("data       ", options.output, " (", human_count(static_cast<double>(report.tokens)),
              " tokens, already prepared)");
  } else {
    if (report.replaced)
      log::warn(
          options.output,
          " held data of other text or settings, or damaged data, which is replaced; runs that use it want a "
          "data.prepared of their own");
    log::info(report.text());
  }
}

std::vector<std::string> source_folders(const TrainConfig& config) {
  std::vector<std::string> folders;
  for (const SourceOptions& source : config.data.sources) folders.push_back(source.path);
  if (folders.empty()) folders.push_back(config.data.prepared);
  return folders;
}

}  // namespace

std::string run_tokenizer_path(const std::string& run_folder) {
  return run_folder + "/tokenizer.json";
}

std::unique_ptr<Tokenizer> open_tokenizer(const TrainConfig& config) {
  const std::string path = source_folders(config).front() + "/tokenizer.json";
  if (!std::filesystem::exists(path)) {
    throw UsageError(
        str("tokenizer ", path,
            ": not found; prepare the data first (`shoal prepare CONFIG`), or put the tokenizer.json of the "
            "token files there"));
  }
  return load_tokenizer(path);
}

TrainData open_data(const TrainConfig& config, const ConfigNode& tree, Communicator& world) {
  if (!config.data.text.empty()) {
    on_rank_zero(world, [&] { prepare_with_progress(config.data.prepare); });
  }
  TrainData data;
  data.tokenizer = open_tokenizer(config);
  const int64_t tokens = data.tokenizer->vocab_size();
  data.vocab_size = config.model_options().vocab_size.value_or(tokens);
  if (data.vocab_size < tokens) {
    throw UsageError(str("config model.vocab_size (", origin_of(tree, "model.vocab_size").text(),
                         "): expected at least the tokenizer's ", tokens, ", got ", data.vocab_size,
                         "; raise it or use auto"));
  }
  std::vector<WeightedDataset> train, validation;
  const std::vector<std::string> folders = source_folders(config);
  const bool held_out = config.data.split.val_fraction > 0 || config.data.split.val_documents > 0;
  for (size_t i = 0; i < folders.size(); i++) {
    const double weight = config.data.sources.empty() ? 1 : config.data.sources[i].weight;
    auto source = std::make_shared<const IndexedDataset>(folders[i] + "/tokens");
    if (i == 0) {
      check_prepared(folders[i], *source, *data.tokenizer);
    } else {
      const auto other = load_tokenizer(folders[i] + "/tokenizer.json");
      check_prepared(folders[i], *source, *other);
      if (other->to_json() != data.tokenizer->to_json()) {
        throw UsageError(str("config data.sources: ", folders[i],
                             " was prepared with another tokenizer than ", folders[0],
                             "; prepare it with tokenizer: {kind: file, path: ", folders[0], "}"));
      }
    }
    train.push_back({std::make_shared<const TokenDataset>(source, config.data.split,
                                                          held_out ? Split::train : Split::all),
                     weight});
    if (held_out) {
      validation.push_back(
          {std::make_shared<const TokenDataset>(source, config.data.split, Split::validation), weight});
    }
  }
  const DataOptions& d = config.data;
  data.train = std::make_shared<const BatchLoader>(d.loader, train, d.seq_len, data.vocab_size);
  if (held_out) {
    LoaderOptions in_order = d.loader;
    in_order.sampling = "sequential";
    data.validation = std::make_shared<const BatchLoader>(in_order, validation, d.seq_len, data.vocab_size);
  }
  return data;
}

}  // namespace shoal
