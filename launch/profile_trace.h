// A profile as a trace-event file, which chrome://tracing and Perfetto open.
#pragma once

#include <string>

#include "core/base/profiler.h"

namespace shoal {

/// JSON with one complete event per span, sorted by begin, outer spans first; the process is the rank.
/// shift_ns is added to the clock's readings: it makes them those of all ranks, with 0 where the first one
/// begins.
std::string trace_json(const Profiler& profiler, int rank, const std::string& title, int64_t shift_ns);

}  // namespace shoal
