// A complete small training run in a temporary folder, with ranks as threads.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/log.h"
#include "core/base/random.h"
#include "launch/trainer.h"
#include "tests/support/gather.h"

namespace shoal::testing {

/// Removed with everything in it at the end of the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "shoal-test-XXXXXX").string();
    SHOAL_CHECK(mkdtemp(pattern.data()) != nullptr, "cannot make a temporary folder");
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// What a finished run left: final state by name (gathered), and the rows of metrics.jsonl without anything
/// that depends on time or memory.
struct RunOutcome {
  TrainEnd end = TrainEnd::done;
  std::map<std::string, std::vector<double>> state;
  std::vector<nlohmann::json> rows;
  double last_loss = 0;
};

/// Short sentences from a small grammar, one document per paragraph.
inline void write_learnable_text(const std::filesystem::path& path) {
  std::ofstream text(path);
  const char* subjects[] = {"the cat", "a dog", "my fish", "the old owl"};
  const char* verbs[] = {"sees", "likes", "fears", "follows"};
  const RandomStream random(1, "tiny run");
  for (uint64_t i = 0; i < 1200; i++) {
    text << subjects[random.below(3 * i, 4)] << ' ' << verbs[random.below(3 * i + 1, 4)] << ' '
         << subjects[random.below(3 * i + 2, 4)] << (i % 6 == 5 ? ".\n\n" : ". ");
  }
}

class TinyRun {
 public:
  TinyRun() {
    log::set_quiet(true);
    write_learnable_text(folder / "text.txt");
  }

  struct Hooks {
    std::function<void()> before_run;            // rank 0, when the trainer is built
    std::function<void(Trainer&)> with_trainer;  // every rank, after that
  };

  /// The base settings.
  std::string yaml() const {
    return str(R"(
run: {name: tiny, steps: 9, log_every: 1, threads: 1, folder: )",
               folder.path().string(), R"(}
model:
  layers: 2
  hidden_size: 16
  heads: 2
  moe: {num_experts: 4, top_k: 2, hidden: 8, shared_experts: 1, first_dense: 1, router: {kind: top_k, score: sigmoid, bias_rate: 0.01}}
data:
  text: [)",
               (folder / "text.txt").string(), R"(]
  documents: blank_line
  tokenizer: byte
  split: {val_fraction: 0.1}
  seq_len: 16
  global_batch: 8
optim: {learning_rate: 0.01, schedule: {kind: cosine, warmup_steps: 2}}
checkpoint: {every: 3, keep_last: 0}
)");
  }

  /// Trains with the base settings and the given overrides on `ranks` ranks.
  RunOutcome train(int ranks, const std::vector<std::string>& overrides = {}, const Hooks& hooks = {}) {
    RunOutcome outcome;
    run_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
      LoadedConfig loaded = load_train_config_text(yaml(), "tiny.yaml", overrides, ranks);
      const std::string metrics = loaded.config.run_folder() + "/metrics.jsonl";
      Trainer trainer(std::move(loaded), world);
      if (hooks.before_run && world->rank() == 0) hooks.before_run();
      world->barrier();
      if (hooks.with_trainer) hooks.with_trainer(trainer);
      const TrainEnd end = trainer.run();
      std::map<std::string, std::vector<double>> state;
      for (const StateTensor& t : trainer.engine().state()) {
        state[t.name] = gather(t, trainer.engine().mesh());
      }
      if (world->rank() != 0) return;
      outcome.end = end;
      outcome.state = std::move(state);
      std::ifstream file(metrics);
      for (std::string line; std::getline(file, line);) {
        nlohmann::json row = nlohmann::json::parse(line);
        if (row["kind"] == "run") continue;
        for (const char* key : {"tokens_per_s", "tflops", "mfu", "step_ms", "peak_bytes"}) row.erase(key);
        if (row["kind"] == "step" && row["loss"].is_number()) outcome.last_loss = row["loss"];
        outcome.rows.push_back(std::move(row));
      }
    });
    return outcome;
  }

  std::filesystem::path checkpoint(int64_t step) const {
    char name[32];
    std::snprintf(name, sizeof name, "step-%09ld", static_cast<long>(step));
    return folder.path() / "tiny" / "checkpoints" / name;
  }
  void forget(int64_t step) const { std::filesystem::remove_all(checkpoint(step)); }

  TemporaryFolder folder;

 private:
  static std::vector<double> gather(const StateTensor& t, const Mesh& mesh) {
    return gather_global(HeldPart(t.value, t.is_flat ? t.boxes : std::vector{t.box}), t.global_shape,
                         mesh.world());
  }
};

}  // namespace shoal::testing
