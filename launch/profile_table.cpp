#include "launch/profile_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

namespace shoal {

namespace {

// The order of a step. Rows that are not named here come before the last two.
constexpr std::array kOrder = {"data",
                               "sums and counts",
                               "embedding",
                               "norms",
                               "attention projections",
                               "positions",
                               "attention",
                               "router",
                               "dispatch, combine",
                               "exchange",
                               "experts up",
                               "experts activation",
                               "experts down",
                               "shared expert",
                               "ffn",
                               "head and loss",
                               "weight packing",
                               "gradient reduction",
                               "gradient norm",
                               "optimizer",
                               "log",
                               "evaluation",
                               "checkpoint"};

size_t place_of(const std::string& name) {
  if (name == kWaitingRow) return kOrder.size() + 1;
  if (name == Profiler::kOther) return kOrder.size() + 2;
  return static_cast<size_t>(std::ranges::find(kOrder, name) - kOrder.begin());
}

double rate(double work, double ms) {
  return ms > 0 ? work / ms * 1e-6 : 0;  // 1e9 per second
}

std::string cell(const char* form, double value, bool shown) {
  return shown ? fmt::format(fmt::runtime(form), value) : std::string{};
}

std::string line(const ProfileSummary& summary, const ProfileRow& row) {
  const double flops = row.cost.all_flops(), bytes = row.cost.bytes + row.collective_bytes;
  const bool timed = row.ms > 0;
  std::string out = fmt::format(
      "  {:<22}{:>9.3f}{:>7.1f}{:>9}{:>9}{:>8}{:>9}{:>8}{:>7}", row.name, row.ms,
      100 * row.ms / summary.step_ms, cell("{:.3f}", row.forward_ms, row.forward_ms > 0),
      cell("{:.3f}", row.backward_ms, row.backward_ms > 0), cell("{:.0f}", row.calls, row.calls > 0),
      cell("{:.1f}", rate(flops, row.ms), timed && flops > 0),
      cell("{:.1f}", rate(bytes, row.ms), timed && bytes > 0),
      cell("{:.1f}", 100 * summary.share_of_ceiling(row), summary.share_of_ceiling(row) > 0));
  if (summary.world_size > 1) out += fmt::format("{:>10.3f}{:>9.3f}", row.min_ms, row.max_ms);
  return out.substr(0, out.find_last_not_of(' ') + 1) + "\n";
}

}  // namespace

std::vector<ProfileRow> profile_rows(const Profiler& profiler,
                                     const std::vector<Profiler::PhaseTimes>& waited) {
  const double steps = std::max<double>(1, static_cast<double>(profiler.num_stretches()));
  const auto add_times = [&](ProfileRow& row, const Profiler::PhaseTimes& ns, double sign) {
    const double to_ms = sign * 1e-6 / steps;
    row.ms += static_cast<double>(ns[0] + ns[1] + ns[2]) * to_ms;
    row.forward_ms += static_cast<double>(ns[1]) * to_ms;
    row.backward_ms += static_cast<double>(ns[2]) * to_ms;
  };
  std::vector<ProfileRow> rows;
  ProfileRow waiting;
  waiting.name = kWaitingRow;
  for (size_t i = 0; i < profiler.rows().size(); i++) {
    const Profiler::Row& from = profiler.rows()[i];
    ProfileRow row;
    row.name = from.name;
    add_times(row, from.ns, 1);
    if (!waited.empty()) {
      add_times(row, waited[i], -1);
      add_times(waiting, waited[i], 1);
    }
    row.calls = static_cast<double>(from.calls) / steps;
    row.cost = {from.cost.flops / steps, from.cost.flops_bf16 / steps, from.cost.bytes / steps};
    row.collective_bytes = from.collective_bytes / steps;
    rows.push_back(row);
  }
  if (!waited.empty()) rows.push_back(waiting);
  std::ranges::stable_sort(rows, {}, [](const ProfileRow& row) { return place_of(row.name); });
  return rows;
}

Cost ProfileSummary::total_cost() const {
  Cost total;
  for (const ProfileRow& row : rows) total += row.cost;
  return total;
}

double ProfileSummary::share_of_ceiling(const ProfileRow& row) const {
  return row.ms > 0 ? 1000 * ceilings.seconds(row.cost) / row.ms : 0;
}

std::string ProfileSummary::text() const {
  std::string out = fmt::format("profile    {} step{}, ms per step{}\n", steps, steps == 1 ? "" : "s",
                                world_size > 1 ? fmt::format(" on rank 0 of {}", world_size) : "");
  out += fmt::format("  {:<22}{:>9}{:>7}{:>9}{:>9}{:>8}{:>9}{:>8}{:>7}", "section", "ms", "%", "forward",
                     "backward", "calls", "GFLOP/s", "GB/s", "% peak");
  if (world_size > 1) out += fmt::format("{:>10}{:>9}", "min rank", "max rank");
  out += '\n';
  for (const ProfileRow& row : rows) {
    if (row.ms > 0 || row.max_ms > 0) out += line(*this, row);
  }
  ProfileRow whole;
  whole.name = "step";
  whole.ms = step_ms;
  whole.min_ms = whole.max_ms = step_ms;
  for (const ProfileRow& row : rows) {
    whole.forward_ms += row.forward_ms;
    whole.backward_ms += row.backward_ms;
    whole.calls += row.calls;
    whole.cost += row.cost;
  }
  whole.cost.bytes = 0;  // a sum over sections with different limits would be compared with nothing
  out += line(*this, whole);
  out += fmt::format("  100 % peak: {:.1f} GFLOP/s, in bf16 {:.1f}, or {:.1f} GB/s", ceilings.flops * 1e-9,
                     ceilings.flops_bf16 * 1e-9, ceilings.bytes * 1e-9);
  if (world_size > 1) out += " on one rank while all measure";
  if (tokens_per_step > 0) {
    const double tokens_per_s = 1000 * tokens_per_step / step_ms;
    out += fmt::format("\n  {:.0f} tokens/s, {:.1f} GFLOP/s by the model's count", tokens_per_s,
                       tokens_per_s * model_flops_per_token * 1e-9);
  }
  return out;
}

nlohmann::json ProfileSummary::to_json() const {
  nlohmann::json sections = nlohmann::json::array();
  for (const ProfileRow& row : rows) {
    sections.push_back({{"name", row.name},
                        {"ms", row.ms},
                        {"forward_ms", row.forward_ms},
                        {"backward_ms", row.backward_ms},
                        {"calls", row.calls},
                        {"flops", row.cost.flops},
                        {"flops_bf16", row.cost.flops_bf16},
                        {"bytes", row.cost.bytes},
                        {"collective_bytes", row.collective_bytes},
                        {"share_of_ceiling", share_of_ceiling(row)},
                        {"min_ms", row.min_ms},
                        {"max_ms", row.max_ms}});
  }
  return {{"steps", steps},
          {"ranks", world_size},
          {"step_ms", step_ms},
          {"tokens_per_step", tokens_per_step},
          {"model_flops_per_token", model_flops_per_token},
          {"ceilings",
           {{"flops", ceilings.flops}, {"flops_bf16", ceilings.flops_bf16}, {"bytes", ceilings.bytes}}},
          {"events_dropped", events_dropped},
          {"sections", sections}};
}

}  // namespace shoal
