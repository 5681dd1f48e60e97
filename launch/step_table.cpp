#include "launch/step_table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "core/base/text.h"

namespace shoal {

struct StepTable::Column {
  const char* heading;
  int width, rank;                // rank 0 is the last to go when the terminal is narrow
  bool StepTableOptions::*needs;  // null: always
  std::string (*text)(const StepMetrics&, double eta_seconds);
};

namespace {

std::string number(const char* pattern, double value) {
  if (std::isnan(value)) return "nan";  // printf shows its sign, which says nothing
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, pattern, value);
  return buffer;
}

std::string right(const std::string& text, int width) {
  const auto size = static_cast<int>(text.size());
  return size >= width ? text : std::string(static_cast<size_t>(width - size), ' ') + text;
}

}  // namespace

const std::vector<StepTable::Column>& StepTable::all_columns() {
  using M = StepMetrics;
  using O = StepTableOptions;
  static const std::vector<Column> columns = {
      {"step", 6, 0, nullptr, [](const M& m, double) { return std::to_string(m.step); }},
      {"loss", 8, 0, nullptr, [](const M& m, double) { return number("%.4f", m.loss); }},
      {"aux", 8, 7, &O::aux_loss, [](const M& m, double) { return number("%.2e", m.aux_loss); }},
      {"z", 8, 8, &O::z_loss, [](const M& m, double) { return number("%.2e", m.z_loss); }},
      {"lr", 8, 5, nullptr, [](const M& m, double) { return number("%.2e", m.learning_rate); }},
      {"grad norm", 9, 4, nullptr, [](const M& m, double) { return number("%.3f", m.grad_norm); }},
      {"max/mean", 8, 3, &O::moe, [](const M& m, double) { return number("%.2f", m.max_load); }},
      {"drop %", 6, 6, &O::drops, [](const M& m, double) { return number("%.2f", 100 * m.dropped); }},
      {"tokens/s", 8, 1, nullptr, [](const M& m, double) { return number("%.0f", m.tokens_per_s); }},
      {"TFLOP/s", 8, 9, nullptr, [](const M& m, double) { return number("%.3f", m.tflops); }},
      {"MFU %", 5, 2, nullptr, [](const M& m, double) { return number("%.1f", 100 * m.mfu); }},
      {"ETA", 11, 1, nullptr,
       [](const M&, double eta) {
         return std::isnan(eta) || eta <= 0 ? std::string("-") : human_duration(eta);
       }},
  };
  return columns;
}

StepTableOptions step_table_options(const TrainConfig& config, int columns) {
  StepTableOptions options;
  options.steps = config.run.steps;
  options.columns = columns;
  options.moe = config.model_options().num_experts() > 0;
  auto on = [settings = flat_settings(to_yaml(config)), &options](const char* key) {
    const auto found = settings.find(key);
    return options.moe && found != settings.end() && found->second != "0";
  };
  options.aux_loss = on("model.moe.router.aux_coeff");
  options.z_loss = on("model.moe.router.z_coeff");
  options.drops = on("model.moe.capacity_factor");
  return options;
}

StepTable::StepTable(const StepTableOptions& options) : options_(options) {
  int width = -1;
  for (const Column& column : all_columns()) {
    if (column.needs != nullptr && !(options_.*column.needs)) continue;
    shown_.push_back(&column);
    width += column.width + 1;
  }
  while (options_.columns > 0 && width > options_.columns - 1) {
    const auto least = std::ranges::max_element(shown_, {}, [](const Column* c) { return c->rank; });
    if ((*least)->rank == 0) break;
    width -= (*least)->width + 1;
    shown_.erase(least);
  }
}

std::string StepTable::header() const {
  std::string out;
  for (const Column* column : shown_) out += (out.empty() ? "" : " ") + right(column->heading, column->width);
  return out;
}

std::string StepTable::line(const StepMetrics& metrics, double eta_seconds) const {
  std::string out;
  for (const Column* column : shown_)
    out += (out.empty() ? "" : " ") + right(column->text(metrics, eta_seconds), column->width);
  return out;
}

std::string StepTable::status(int64_t step, double tokens_per_s, double eta_seconds) const {
  constexpr int kWidest = 40, kNarrowest = 8;
  const double share =
      options_.steps > 0 ? static_cast<double>(step) / static_cast<double>(options_.steps) : 1;
  const std::string total = std::to_string(options_.steps);
  const std::string before = right(std::to_string(step), static_cast<int>(total.size())) + "/" + total + " ";
  std::string after = right(number("%.0f", 100 * share), 3) + " %";
  after += "  " + human_count(tokens_per_s) + " tokens/s";
  if (!std::isnan(eta_seconds)) after += "  ETA " + human_duration(eta_seconds);
  const int room = options_.columns - 1 - static_cast<int>(before.size() + after.size()) - 3;
  std::string bar;
  if (room >= kNarrowest) {
    const int width = std::min(room, kWidest);
    const int filled = std::clamp(static_cast<int>(share * width), 0, width);
    bar = "[" + std::string(static_cast<size_t>(filled), '#') +
          std::string(static_cast<size_t>(width - filled), '.') + "] ";
  }
  return before + bar + after;
}

}  // namespace shoal
