#include "launch/console.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/tensor/kernel.h"
#include "launch/engine.h"
#include "launch/trainer.h"

namespace shoal {

namespace {

template <class... Args>
std::string format(const char* pattern, Args... args) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, pattern, args...);
  return buffer;
}

/// printf shows the sign of a NaN, which says nothing.
double plain(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

std::string count(int64_t value) {
  return human_count(static_cast<double>(value));
}

}  // namespace

std::string eval_line(const EvalMetrics& m) {
  if (m.tokens == 0)
    return format("  validation at step %ld: no token of the held-out data has a label, so there is no loss",
                  static_cast<long>(m.step));
  return format("  validation at step %ld: loss %.4f, perplexity %.2f (%s tokens)", static_cast<long>(m.step),
                plain(m.loss), plain(std::exp(m.loss)), count(m.tokens).c_str());
}

namespace {

std::string plural(int64_t number, const char* noun, const char* ending = "s") {
  return str(number, " ", noun, number == 1 ? "" : ending);
}

std::string data_line(const TrainConfig& config, const TrainData& data) {
  const auto tokens = static_cast<double>(config.data.global_batch * config.data.seq_len * config.run.steps);
  const auto per_epoch = static_cast<double>(data.train->samples_per_epoch() * config.data.seq_len);
  std::string out =
      format("%s training windows of %ld tokens", count(data.train->samples_per_epoch()).c_str(),
             static_cast<long>(config.data.seq_len));
  if (per_epoch > 0) out += format(" (%.2f epochs)", tokens / per_epoch);
  return out + format(", vocabulary %ld", static_cast<long>(data.vocab_size));
}

/// Axes of more than one rank, and dp, ep and edp.
std::string layout_text(const ParallelLayout& l) {
  const auto more = [](const char* axis, int degree) {
    return degree > 1 ? str(axis, ' ', degree, ", ") : "";
  };
  return str(more("tp", l.tp), more("cp", l.cp), more("pp", l.pp), "dp ", l.dp, ", ", more("etp", l.etp),
             "ep ", l.ep, ", edp ", l.edp);
}

std::string batch_line(const TrainConfig& config, const TrainEngine& engine) {
  const int64_t tokens_per_step = config.data.global_batch * config.data.seq_len;
  std::string out =
      format("%s = %s tokens per step; %s: %s tokens", plural(config.data.global_batch, "sequence").c_str(),
             count(tokens_per_step).c_str(), plural(config.run.steps, "step").c_str(),
             count(tokens_per_step * config.run.steps).c_str());
  const int64_t micro = micro_batch_of(config, engine.mesh().layout());
  const int64_t num_micro = config.data.global_batch / (micro * engine.mesh().layout().dp);
  if (num_micro > 1)
    out += format("\n           %ld micro-batches of %s per rank", static_cast<long>(num_micro),
                  plural(micro, "sequence").c_str());
  return out;
}

}  // namespace

std::string run_summary(const TrainConfig& config, TrainEngine& engine, const TrainData& data,
                        double peak_flops, int64_t step) {
  const ModelFacts& f = engine.model().facts();
  const ParallelLayout& l = engine.mesh().layout();
  std::string out = format("run        %s, step %ld of %ld\n", config.run_folder().c_str(),
                           static_cast<long>(step), static_cast<long>(config.run.steps));
  out += format("model      %s, %s parameters, %s active, %s embedding\n", config.model.kind.c_str(),
                count(f.params_total).c_str(), count(f.params_active).c_str(),
                count(f.params_embedding).c_str());
  out += "data       " + data_line(config, data) + "\n";
  out += "batch      " + batch_line(config, engine) + "\n";
  out += format("layout     %s: %s of %s\n", layout_text(l).c_str(),
                plural(l.tp * l.cp * l.dp * l.pp, "rank").c_str(), plural(num_threads(), "thread").c_str());
  static constexpr const char* kDivided[] = {"", "optimizer state", "optimizer state and gradients",
                                             "optimizer state, gradients and weights"};
  if (config.parallel.zero > 0)
    out +=
        str("zero       ", kDivided[config.parallel.zero], " divided among the replicas of each parameter\n");
  out += format("precision  %s\n", config.run.precision.c_str());
  const MemoryEstimate memory = estimate_memory(config, l, data.vocab_size);
  const auto [first, second, third] = memory.parts();
  const std::string next = ",\n           ";
  out += str("memory     predicted peak ", memory.total_text(), " per rank: ", first, next, second, next,
             third, "\n");
  out += format(
      "machine    %s kernels, GEMM peak %.3f TFLOP/s in all (100 %% MFU):\n"
      "           at %s FLOP per token at most %s tokens/s\n",
      cpu_isa_name(cpu_isa()), peak_flops / 1e12, human_count(f.flops_per_token()).c_str(),
      human_count(peak_flops / f.flops_per_token()).c_str());
  return out;
}

std::string run_end(const TrainConfig& config, int64_t first_step, int64_t last_step, double seconds,
                    const MemoryUse& memory, bool saved) {
  const std::string run = config.run_folder();
  const int64_t steps = last_step - first_step + 1;
  return format("time       %s for %s, evaluation and saving included\n", human_duration(seconds).c_str(),
                plural(steps, "step").c_str()) +
         str("memory     peak ", human_bytes(memory.peak_bytes), " of tensors, predicted ",
             memory.predicted.total_text(), "\n") +
         str("folder     ", run, ": ", saved ? "checkpoints, " : "no checkpoint, ",
             "metrics.jsonl, config.yaml, tokenizer.json\n", "next       ", program_invocation_name,
             " report ", run) +
         (saved ? str("\n           ", program_invocation_name, " generate ", run,
                      " --prompt \"Your text\"\n", "           ", program_invocation_name, " eval ", run)
                : "");
}

std::string run_record(const TrainConfig& config, TrainEngine& engine, int world_size) {
  const ModelFacts& f = engine.model().facts();
  const ParallelLayout& l = engine.mesh().layout();
  return nlohmann::json{{"kind", "run"},
                        {"name", config.run.name},
                        {"config", flat_settings(to_yaml(config))},
                        {"layout", layout_text(l)},
                        {"params_total", f.params_total},
                        {"params_active", f.params_active},
                        {"params_embedding", f.params_embedding},
                        {"flops_per_token", f.flops_per_token()},
                        {"world", world_size}}
      .dump();
}

void write_resolved_config(const TrainConfig& config) {
  const std::filesystem::path path = std::filesystem::path(config.run_folder()) / "config.yaml";
  write_file(path.string(), "# Resolved configuration of the last start of this run.\n" + to_yaml(config));
}

namespace {

// One row per MoE layer: load of each expert relative to the mean.
std::string expert_load_table(const nlohmann::json& layers) {
  constexpr size_t kColumns = 16, kMaxShown = 256;
  std::string out = "expert load in the last step, as a multiple of the mean\n";
  for (const nlohmann::json& layer : layers) {
    const auto counts = layer.at("counts").get<std::vector<int64_t>>();
    int64_t total = 0;
    for (const int64_t c : counts) total += c;
    const double mean = std::max(1e-9, static_cast<double>(total) / static_cast<double>(counts.size()));
    if (counts.size() > kMaxShown) {
      const auto idle = std::ranges::count(counts, 0);
      out += format("  layer %2ld  %zu experts, busiest %.2f, %ld without a token\n",
                    static_cast<long>(layer.at("layer").get<int64_t>()), counts.size(),
                    static_cast<double>(std::ranges::max(counts)) / mean, static_cast<long>(idle));
      continue;
    }
    for (size_t e = 0; e < counts.size(); e++) {
      if (e % kColumns == 0) {
        out += e == 0 ? format("  layer %2ld ", static_cast<long>(layer.at("layer").get<int64_t>()))
                      : std::string("\n           ");
      }
      out += format(" %3.1f", static_cast<double>(counts[e]) / mean);
    }
    out += '\n';
  }
  return out;
}

// The text behind the labels, cut after commas into lines of at most 80 columns.
std::string in_lines(const std::string& text) {
  constexpr size_t kWidth = 69;
  std::string out, line;
  for (size_t begin = 0; begin < text.size();) {
    const size_t comma = text.find(", ", begin), end = comma == std::string::npos ? text.size() : comma + 2;
    const std::string part = text.substr(begin, end - begin);
    if (!line.empty() && line.size() + part.size() > kWidth) {
      line.pop_back();
      out += line + "\n           ";
      line.clear();
    }
    line += part;
    begin = end;
  }
  return out + line;
}

// What rank 0 sent in the step of a row.
std::string sent_text(const nlohmann::json& step) {
  if (!step.contains("traffic")) return "";
  std::map<std::string, LinkBytes> traffic;
  for (const auto& [group, sent] : step["traffic"].items())
    traffic[group] = {sent.at("within_node").get<int64_t>(), sent.at("between_nodes").get<int64_t>()};
  const std::string text = traffic_text(traffic);
  return text.empty() ? "" : "rank 0 sends in a step " + text;
}

std::string result_text(const std::filesystem::path& metrics_file, int64_t last_step) {
  std::ifstream file(metrics_file);
  nlohmann::json step, eval;
  std::vector<double> speeds;
  for (std::string line; std::getline(file, line);) {
    nlohmann::json row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!row.is_object()) continue;
    const auto found = row.find("kind");
    const std::string kind = found != row.end() && found->is_string() ? *found : "";
    if ((kind == "eval" || kind == "step") && row.contains("step") && row["step"].is_number_integer() &&
        row["step"].get<int64_t>() > last_step)
      continue;
    if (kind == "eval") eval = row;
    if (kind != "step") continue;
    if (row.contains("tokens_per_s") && row["tokens_per_s"].is_number())
      speeds.push_back(row["tokens_per_s"]);
    step = std::move(row);
  }
  if (!step.is_object()) return "";
  std::string out =
      format("result     step %ld, %s tokens", static_cast<long>(step.at("step").get<int64_t>()),
             count(step.at("tokens")).c_str());
  if (eval.is_object() && eval.contains("loss") && eval["loss"].is_number()) {
    const double loss = eval["loss"];
    out += format(": validation loss %.4f (perplexity %.2f)", loss, std::exp(loss));
  } else if (eval.is_object() && eval.contains("loss")) {
    out += ": no finite validation loss";
  }
  if (!speeds.empty() && step.contains("loss") && step["loss"].is_number()) {
    std::ranges::nth_element(speeds, speeds.begin() + static_cast<ptrdiff_t>(speeds.size() / 2));
    out += format("\n           training loss %.4f; median %s tokens/s in steps", step["loss"].get<double>(),
                  human_count(speeds[speeds.size() / 2]).c_str());
  }
  if (const std::string sent = sent_text(step); !sent.empty()) out += "\ntraffic    " + in_lines(sent);
  out += '\n';
  if (step.contains("moe") && !step["moe"].empty()) out += expert_load_table(step["moe"]);
  out.pop_back();
  return out;
}

}  // namespace

std::string run_result(const std::filesystem::path& metrics_file, int64_t last_step) {
  try {
    return result_text(metrics_file, last_step);
  } catch (const nlohmann::json::exception& e) {
    return str("result     unknown: ", metrics_file.string(), " has a row of another format (", e.what(),
               ")");
  }
}

}  // namespace shoal
