#include "launch/report_data.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/error.h"

namespace shoal {

namespace {

using Json = nlohmann::json;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double number(const Json& row, const char* key) {
  const auto it = row.find(key);
  return it != row.end() && it->is_number() ? it->get<double>() : kNaN;
}

std::optional<int64_t> integer(const Json& row, const char* key) {
  const auto it = row.find(key);
  if (it == row.end() || !it->is_number_integer()) return std::nullopt;
  return it->get<int64_t>();
}

void flatten(const Json& node, const std::string& prefix, std::map<std::string, std::string>& out) {
  if (!node.is_object()) {
    out[prefix] = node.is_string() ? node.get<std::string>() : node.dump();
    return;
  }
  for (const auto& [key, value] : node.items())
    flatten(value, prefix.empty() ? key : str(prefix, ".", key), out);
}

// "ep 2, dp 4": the axes of the config that are larger than one, unless the run row has a text of its own.
std::string layout_of(const Json& row, const std::map<std::string, std::string>& config) {
  if (const auto it = row.find("layout"); it != row.end() && it->is_string()) return *it;
  std::string layout;
  for (const char* axis : {"dp", "tp", "cp", "pp", "ep", "etp", "edp"}) {
    const auto it = config.find(str("parallel.", axis));
    if (it == config.end() || it->second == "1" || it->second == "auto" || it->second == "null") continue;
    layout += str(layout.empty() ? "" : ", ", axis, " ", it->second);
  }
  return layout;
}

void read_run_row(const Json& row, RunData& run) {
  if (const auto it = row.find("name"); it != row.end() && it->is_string() && !it->get<std::string>().empty())
    run.name = *it;
  run.params_total = integer(row, "params_total");
  run.params_active = integer(row, "params_active");
  run.world = integer(row, "world");
  run.config.clear();
  if (const auto it = row.find("config"); it != row.end() && it->is_object()) flatten(*it, "", run.config);
  run.layout = layout_of(row, run.config);
}

LayerHistory& layer_of(RunData& run, int64_t layer) {
  auto it =
      std::lower_bound(run.layers.begin(), run.layers.end(), layer,
                       [](const LayerHistory& history, int64_t wanted) { return history.layer < wanted; });
  if (it == run.layers.end() || it->layer != layer) {
    it = run.layers.emplace(it);
    it->layer = layer;
  }
  return *it;
}

void read_layer(const Json& row, int64_t step, RunData& run) {
  const auto layer = integer(row, "layer");
  if (!row.is_object() || !layer) return;
  LayerHistory& history = layer_of(run, *layer);
  const auto x = static_cast<double>(step);
  history.max_vio.push_back({x, number(row, "max_vio")});
  history.entropy.push_back({x, number(row, "entropy")});
  history.dead.push_back({x, number(row, "dead")});
  history.dropped.push_back({x, number(row, "dropped")});
  history.bias_min.push_back({x, number(row, "bias_min")});
  history.bias_max.push_back({x, number(row, "bias_max")});
  const auto counts = row.find("counts");
  if (counts == row.end() || !counts->is_array()) return;
  std::vector<double> counts_E;
  counts_E.reserve(counts->size());
  for (const auto& count : *counts) counts_E.push_back(count.is_number() ? count.get<double>() : 0);
  if (!counts_E.empty()) history.load.add(step, counts_E);
}

void read_traffic(const Json& groups, RunData& run) {
  run.traffic.clear();
  for (const auto& [group, sent] : groups.items()) {
    if (sent.is_object())
      run.traffic[group] = {integer(sent, "within_node").value_or(0),
                            integer(sent, "between_nodes").value_or(0)};
  }
}

bool read_row(const Json& row, RunData& run) {
  if (!row.is_object()) return false;
  const auto kind = row.find("kind");
  if (kind == row.end() || !kind->is_string()) return false;
  if (*kind == "run") {
    read_run_row(row, run);
    return true;
  }
  const auto step = integer(row, "step");
  if (!step) return false;
  if (*kind == "eval") {
    run.eval_loss.push_back({static_cast<double>(*step), number(row, "loss")});
  } else if (*kind == "step") {
    for (size_t i = 0; i < RunData::kColumns.size(); i++)
      run.columns[i].push_back(number(row, RunData::kColumns[i]));
    if (const auto traffic = row.find("traffic"); traffic != row.end() && traffic->is_object())
      read_traffic(*traffic, run);
    if (const auto moe = row.find("moe"); moe != row.end() && moe->is_array())
      for (const auto& layer : *moe) read_layer(layer, *step, run);
  }
  return true;  // other kinds may come from newer versions
}

}  // namespace

void LoadHistory::add(int64_t step, const std::vector<double>& counts_E) {
  if (!columns_.empty() && counts_E.size() != num_experts()) return;
  if (columns_.empty() || rows_in_last_ == rows_per_column_) {
    if (columns_.size() == kMaxColumns) {
      shrink(kMaxColumns / 2);
      rows_per_column_ *= 2;
    }
    columns_.push_back({step, step, counts_E});
    rows_in_last_ = 1;
    return;
  }
  Column& last = columns_.back();
  last.last_step = step;
  for (size_t e = 0; e < counts_E.size(); e++) last.counts[e] += counts_E[e];
  rows_in_last_++;
}

void LoadHistory::shrink(size_t max_columns) {
  const size_t group = (columns_.size() + max_columns - 1) / max_columns;
  if (group <= 1) return;
  size_t kept = 0;
  for (size_t begin = 0; begin < columns_.size(); begin += group, kept++) {
    Column joined = std::move(columns_[begin]);
    for (size_t i = begin + 1; i < std::min(begin + group, columns_.size()); i++) {
      joined.last_step = columns_[i].last_step;
      for (size_t e = 0; e < joined.counts.size(); e++) joined.counts[e] += columns_[i].counts[e];
    }
    columns_[kept] = std::move(joined);
  }
  columns_.resize(kept);
}

const std::vector<double>& RunData::column(std::string_view name) const {
  const auto it = std::find(kColumns.begin(), kColumns.end(), name);
  SHOAL_CHECK(it != kColumns.end(), "report: no column '", name, "'");
  return columns[static_cast<size_t>(it - kColumns.begin())];
}

std::vector<Point> RunData::points(std::string_view name, std::string_view x) const {
  const auto &xs = column(x), &ys = column(name);
  std::vector<Point> points;
  points.reserve(xs.size());
  for (size_t i = 0; i < xs.size(); i++) points.push_back({xs[i], ys[i]});
  return points;
}

double RunData::training_seconds() const {
  const auto &tokens = column("tokens"), &speed = column("tokens_per_s");
  double seconds = 0, before = 0;
  for (size_t i = 0; i < tokens.size(); i++) {
    if (!std::isfinite(tokens[i]) || !(speed[i] > 0)) continue;
    seconds += (tokens[i] - before) / speed[i];
    before = tokens[i];
  }
  return seconds;
}

RunData read_run(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  RunData run;
  run.file = fs::is_directory(path) ? path / "metrics.jsonl" : path;
  if (!fs::is_regular_file(run.file)) {
    throw UsageError(str("report: ", run.file.string(), ": there is no such file; give the folder of a run ",
                         "(with metrics.jsonl in it) or a metrics file"));
  }
  std::ifstream in(run.file, std::ios::binary);
  SHOAL_CHECK(in, "report: ", run.file.string(), ": cannot be read; check its permissions");
  const fs::path folder = fs::absolute(run.file).lexically_normal().parent_path();
  run.name = folder.filename().string();
  for (std::string line; std::getline(in, line);) {
    if (line.empty()) continue;
    if (!read_row(Json::parse(line, nullptr, /*allow_exceptions=*/false), run)) run.num_bad_rows++;
  }
  return run;
}

}  // namespace shoal
