// BenchReport as text and JSON.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/tensor/kernel.h"
#include "launch/bench.h"

namespace shoal {

namespace {

std::string bytes_name(int64_t bytes) {
  return bytes >= 1 << 20 ? fmt::format("{} MiB", bytes >> 20) : fmt::format("{} KiB", bytes >> 10);
}

std::string share(double value, double ceiling) {
  return ceiling > 0 ? fmt::format("{:.0f} %", 100 * value / ceiling) : "";
}

std::string collectives_text(const BenchReport& report) {
  std::string out = fmt::format("\n{:<44}{:>16}{:>16}{:>16}{:>16}\n", "collectives of all ranks, GB/s",
                                "all_reduce", "all_gather", "reduce_scatter", "all_to_all");
  for (size_t i = 0; i + 3 < report.collectives.size(); i += 4) {
    out += fmt::format("  {:<42}", bytes_name(report.collectives[i].bytes));
    for (size_t c = i; c < i + 4; c++) out += fmt::format("{:>16.2f}", report.collectives[c].rate());
    out += '\n';
  }
  return out + "  bytes of the larger of a rank's two buffers / time of one call\n";
}

}  // namespace

std::string BenchReport::text() const {
  std::string out = fmt::format("machine    {} kernels, {} rank{} of {} thread{}\n", cpu_isa_name(cpu_isa()),
                                ranks, ranks == 1 ? "" : "s", threads, threads == 1 ? "" : "s");
  const BenchRow* ceiling = nullptr;
  bool disturbed = false;
  for (const BenchRow& row : rows) {
    if (ceiling == nullptr || ceiling->group != row.group) {
      ceiling = &row;
      const bool memory = row.group == "memory";
      out += fmt::format("\n{:<44}{:>12}{:>8}{:>14}{:>8}\n", row.group + (memory ? ", GB/s" : ", GFLOP/s"),
                         "1 thread", "%", "all threads", "%");
    }
    out += fmt::format("  {:<42}{:>12.1f}{:>8}{:>14.1f}{:>8}\n", row.name, row.one_thread,
                       share(row.one_thread, ceiling->one_thread), row.all, share(row.all, ceiling->all));
    // What a pass over memory reaches depends on the pattern; nothing exceeds multiply-adds in registers.
    constexpr double kNoise = 1.03;
    const auto above = [&](double rate, double most) { return most > 0 && rate > kNoise * most; };
    disturbed |=
        row.group != "memory" && (above(row.one_thread, ceiling->one_thread) || above(row.all, ceiling->all));
  }
  if (disturbed)
    out +=
        "\n  More than 100 % of the multiply-adds: something else ran while those were measured. Run it\n"
        "  again on an idle machine, or with a larger --seconds.\n";
  if (!collectives.empty()) out += collectives_text(*this);
  if (step) out += fmt::format("\nstep of {}, random tokens\n{}\n", step_name, step->text());
  return out;
}

nlohmann::json BenchReport::to_json() const {
  nlohmann::json json = {{"kernels", cpu_isa_name(cpu_isa())}, {"ranks", ranks}, {"threads", threads}};
  json["rates"] = nlohmann::json::array();
  for (const BenchRow& row : rows) {
    json["rates"].push_back({{"group", row.group},
                             {"name", row.name},
                             {"unit", row.group == "memory" ? "GB/s" : "GFLOP/s"},
                             {"one_thread", row.one_thread},
                             {"all_threads", row.all}});
  }
  json["collectives"] = nlohmann::json::array();
  for (const CollectiveRow& row : collectives) {
    json["collectives"].push_back(
        {{"name", row.name}, {"bytes", row.bytes}, {"seconds", row.seconds}, {"gb_per_s", row.rate()}});
  }
  if (step) {
    json["step"] = step->to_json();
    json["step"]["config"] = step_name;
  }
  return json;
}

}  // namespace shoal
