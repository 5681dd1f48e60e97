// A folder with a text, an experiment and its run; `shoal` is started in it, alone or under mpirun.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "core/base/random.h"
#include "tests/support/job.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {

/// "cannot open x" in "error: cannot open x".
inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
inline int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) n++;
  return n;
}

/// Paths in the experiment are relative, so runs in different folders leave the same bytes.
class ShoalFolder {
 public:
  /// `slow`: a run long enough to be interrupted.
  explicit ShoalFolder(bool slow = false) {
    write_learnable_text(folder_ / "text.txt");
    std::ofstream(folder_ / "tiny.yaml")
        << str("run: {name: tiny, steps: ", slow ? 120 : 6, ", log_every: 1, threads: 1}\n",
               "model:\n  layers: ", slow ? 4 : 2, "\n  hidden_size: ", slow ? 32 : 16,
               "\n"
               "  heads: 2\n"
               "  moe: {num_experts: ",
               slow ? 6 : 4,
               ", top_k: 2, hidden: 8, shared_experts: 1, first_dense: 1,\n"
               "        router: {kind: top_k, score: sigmoid, bias_rate: 0.01}}\n"
               "data:\n"
               "  text: [text.txt]\n"
               "  documents: blank_line\n"
               "  tokenizer: byte\n"
               "  split: {val_fraction: 0.1}\n"
               "  seq_len: ",
               slow ? 32 : 16,
               "\n"
               "  global_batch: ",
               slow ? 12 : 8, "\n  micro_batch: ", slow ? "2" : "auto",
               "\n"
               "optim: {learning_rate: 0.01, schedule: {kind: cosine, warmup_steps: 2}}\n"
               "parallel: {ep: auto}\n"
               "eval: {samples: 21}\n"
               "checkpoint: {every: ",
               slow ? 10 : 3, ", keep_last: ", slow ? 2 : 0, "}\n");
  }

  static std::vector<std::string> command(int ranks, const std::vector<std::string>& arguments) {
    std::vector<std::string> argv;
    if (ranks > 1) {
      argv = {"mpirun",    "-n",   std::to_string(ranks), "--oversubscribe",
              "--bind-to", "none", "--allow-run-as-root"};
    }
    argv.emplace_back(SHOAL_BINARY_DIR "/shoal");
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    return argv;
  }
  /// Runs to the end. `ranks` 1: without mpirun.
  Ended shoal(int ranks, const std::vector<std::string>& arguments) const {
    return Job(command(ranks, arguments), folder_.path()).wait();
  }
  Ended shoal(const std::vector<std::string>& arguments) const { return shoal(1, arguments); }

  std::filesystem::path path(const std::string& name) const { return folder_ / name; }
  std::filesystem::path checkpoints() const { return folder_ / "runs/tiny/checkpoints"; }
  std::filesystem::path checkpoint(int64_t step) const {
    char name[32];
    std::snprintf(name, sizeof name, "step-%09ld", static_cast<long>(step));
    return checkpoints() / name;
  }

  /// Rows of metrics.jsonl of steps and evaluations, without what depends on time and memory.
  std::vector<nlohmann::json> rows() const {
    std::vector<nlohmann::json> out;
    std::ifstream file(folder_ / "runs/tiny/metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      nlohmann::json row = nlohmann::json::parse(line);
      if (row["kind"] == "run") continue;
      for (const char* key : {"tokens_per_s", "tflops", "mfu", "step_ms", "peak_bytes"}) row.erase(key);
      out.push_back(std::move(row));
    }
    return out;
  }
  /// Number of complete rows that the run has written so far.
  int num_rows() const { return count(file_bytes(folder_ / "runs/tiny/metrics.jsonl"), "\n"); }
  /// Bytes of every file of one checkpoint. Equal states give equal files.
  std::map<std::string, std::string> checkpoint_bytes(int64_t step) const {
    std::map<std::string, std::string> bytes;
    for (const auto& entry : std::filesystem::directory_iterator(checkpoint(step)))
      bytes[entry.path().filename().string()] = file_bytes(entry.path());
    return bytes;
  }
  /// Names in the checkpoints folder that are no complete checkpoint.
  std::vector<std::string> odd_checkpoint_names() const {
    std::vector<std::string> odd;
    for (const auto& entry : std::filesystem::directory_iterator(checkpoints())) {
      const std::string name = entry.path().filename().string();
      if (name.size() != 14 || !std::filesystem::exists(entry.path() / "MANIFEST.json")) odd.push_back(name);
    }
    return odd;
  }
  /// What Open MPI keeps in shared memory.
  std::vector<std::string> shared_memory() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "shm"))
      names.push_back(entry.path().filename().string());
    return names;
  }

 private:
  TemporaryFolder folder_;
};

}  // namespace shoal::testing
