#include "launch/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "data/file_io.h"

namespace shoal {

namespace {

using Json = nlohmann::ordered_json;  // dumps doubles as the shortest text that reads back, NaN as null

Json to_json(const LayerMetrics& layer) {
  return {{"layer", layer.layer},       {"counts", layer.counts},    {"max_vio", layer.max_vio},
          {"entropy", layer.entropy},   {"dead", layer.dead},        {"dropped", layer.dropped},
          {"bias_min", layer.bias_min}, {"bias_max", layer.bias_max}};
}

Json to_json(const StepMetrics& m) {
  Json row = {{"kind", "step"},
              {"step", m.step},
              {"tokens", m.tokens},
              {"loss", m.loss},
              {"aux_loss", m.aux_loss},
              {"z_loss", m.z_loss},
              {"learning_rate", m.learning_rate},
              {"grad_norm", m.grad_norm},
              {"max_load", m.max_load},
              {"dropped", m.dropped},
              {"skipped", m.skipped},
              {"tokens_per_s", m.tokens_per_s},
              {"tflops", m.tflops},
              {"mfu", m.mfu},
              {"step_ms", m.step_ms},
              {"peak_bytes", m.peak_bytes},
              {"traffic", Json::object()},
              {"moe", Json::array()}};
  for (const auto& [group, sent] : m.traffic)
    row["traffic"][group] = {{"within_node", sent.within_node}, {"between_nodes", sent.between_nodes}};
  for (const auto& layer : m.layers) row["moe"].push_back(to_json(layer));
  return row;
}

// Whether a line is a complete row that belongs to the steps up to last_step.
bool belongs(const std::string& line, int64_t last_step) {
  const Json row = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!row.is_object()) return false;
  const auto kind = row.find("kind");
  if (kind == row.end() || !kind->is_string()) return false;
  if (*kind == "run") return true;
  const auto step = row.find("step");
  return step != row.end() && step->is_number_unsigned() &&
         step->get<uint64_t>() <= static_cast<uint64_t>(last_step);
}

}  // namespace

std::map<std::string, LinkBytes> bytes_of_groups(const Traffic& traffic) {
  std::map<std::string, LinkBytes> groups;
  for (const auto& [name, group] : traffic) groups[name] = group.total().sent;
  return groups;
}

std::string traffic_text(const std::map<std::string, LinkBytes>& traffic) {
  constexpr size_t kShown = 4;
  std::vector<std::pair<int64_t, std::string>> groups;
  int64_t all = 0, between = 0, others = 0;
  for (const auto& [name, sent] : traffic) {
    groups.emplace_back(-sent.total(), name);  // most first
    all += sent.total();
    between += sent.between_nodes;
  }
  if (all == 0) return "";
  std::ranges::sort(groups);
  std::vector<std::string> shown;
  for (const auto& [bytes, name] : groups) {
    if (shown.size() < kShown)
      shown.push_back(str(name, ' ', human_bytes(-bytes)));
    else
      others -= bytes;
  }
  if (others > 0) shown.push_back(str("others ", human_bytes(others)));
  return str(human_bytes(all), " (", join(shown, ", "), "), ", human_bytes(between), " between nodes");
}

void MetricsWriter::begin(int64_t last_step) {
  std::error_code ignored;
  std::filesystem::create_directories(file_.parent_path(), ignored);
  AtomicFile kept(file_.string());
  if (last_step >= 0 && std::filesystem::exists(file_)) {
    std::ifstream in(file_, std::ios::binary);
    SHOAL_CHECK(in, "metrics ", file_.string(), ": cannot be read; check its permissions");
    std::string line;
    while (std::getline(in, line)) {
      if (in.eof() || !belongs(line, last_step)) continue;  // eof: no line end, so the row is torn
      line += '\n';
      kept.write(line.data(), line.size());
    }
    SHOAL_CHECK(in.eof(), "metrics ", file_.string(), ": reading failed");
  }
  kept.commit();
}

void MetricsWriter::write_run(const std::string& json_object) {
  const Json given = Json::parse(json_object, nullptr, /*allow_exceptions=*/false);
  SHOAL_CHECK(given.is_object(), "metrics ", file_.string(),
              ": the run row is no JSON object: ", json_object);
  Json row = {{"kind", "run"}};
  row.update(given);
  row["kind"] = "run";
  append(row.dump());
}

void MetricsWriter::write(const StepMetrics& metrics) {
  append(to_json(metrics).dump());
}

void MetricsWriter::write(const EvalMetrics& metrics) {
  const Json row = {{"kind", "eval"},
                    {"step", metrics.step},
                    {"loss", metrics.loss},
                    {"perplexity", std::exp(metrics.loss)},
                    {"tokens", metrics.tokens}};
  append(row.dump());
}

void MetricsWriter::append(const std::string& line) {
  const std::string row = line + "\n";
  std::string problem;
  const int fd = ::open(file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) {
    problem = std::strerror(errno);
  } else {
    const off_t end = ::lseek(fd, 0, SEEK_END);
    ssize_t written = 0;
    do {
      written = ::write(fd, row.data(), row.size());
    } while (written < 0 && errno == EINTR);
    if (written != static_cast<ssize_t>(row.size())) {
      problem = written < 0 ? std::strerror(errno) : "no space for the whole row";
      // Without its torn half the next row starts on a line of its own.
      if (written > 0 && ::ftruncate(fd, end) != 0) problem += ", and the torn row could not be removed";
    }
    ::close(fd);
  }
  if (problem.empty()) return;
  num_lost_rows_++;
  if (!std::has_single_bit(static_cast<uint64_t>(num_lost_rows_))) return;  // 1, 2, 4, ...: no flood
  log::warn("metrics ", file_.string(), ": a row is lost (", problem, "); ", num_lost_rows_, " lost so far");
}

}  // namespace shoal
