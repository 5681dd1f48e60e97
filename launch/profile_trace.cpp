#include "launch/profile_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

namespace shoal {

namespace {

const char* category(const Profiler::Event& event) {
  if (event.kind == Profiler::Kind::scope) return "scope";
  return event.kind == Profiler::Kind::kernel ? "kernel" : "collective";
}

/// Names are literals of this program, or a layer's name and number: nothing to escape.
void append_event(std::string& out, const Profiler& profiler, const Profiler::Event& event, int rank,
                  int64_t shift_ns) {
  const auto to = std::back_inserter(out);
  fmt::format_to(
      to, R"({{"ph":"X","pid":{},"tid":0,"cat":"{}","name":"{}{}{}","ts":{:.3f},"dur":{:.3f},"args":{{)",
      rank, category(event), event.name, event.index >= 0 ? fmt::format(" {}", event.index) : "",
      event.waits ? " wait" : "", static_cast<double>(event.begin_ns + shift_ns) * 1e-3,
      static_cast<double>(event.end_ns - event.begin_ns) * 1e-3);
  fmt::format_to(to, R"("section":"{}")", profiler.rows()[profiler.row_of(event)].name);
  if (event.cost.all_flops() > 0) fmt::format_to(to, R"(,"flops":{:.0f})", event.cost.all_flops());
  if (event.cost.bytes > 0) fmt::format_to(to, R"(,"bytes":{:.0f})", event.cost.bytes);
  if (event.collective.name != nullptr) {
    fmt::format_to(to, R"(,"payload_bytes":{:.0f},"call":{})", event.collective.bytes, event.collective.call);
  }
  out += "}}";
}

}  // namespace

std::string trace_json(const Profiler& profiler, int rank, const std::string& title, int64_t shift_ns) {
  std::vector<const Profiler::Event*> events;
  for (const Profiler::Event* e = profiler.events_begin(); e != profiler.events_end(); e++)
    events.push_back(e);
  // Of two spans with the same begin and end the outer one ended later, so it comes later in the list.
  std::ranges::reverse(events);
  std::ranges::stable_sort(events, [](const Profiler::Event* a, const Profiler::Event* b) {
    return a->begin_ns != b->begin_ns ? a->begin_ns < b->begin_ns : a->end_ns > b->end_ns;
  });
  const nlohmann::json process = {{"ph", "M"},
                                  {"pid", rank},
                                  {"tid", 0},
                                  {"name", "process_name"},
                                  {"args", {{"name", fmt::format("rank {} of {}", rank, title)}}}};
  std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  out += process.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  for (const Profiler::Event* event : events) {
    out += ",\n";
    append_event(out, profiler, *event, rank, shift_ns);
  }
  return out + "\n]}\n";
}

}  // namespace shoal
