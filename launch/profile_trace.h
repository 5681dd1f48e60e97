// A profile as a trace-event file, which chrome://tracing and Perfetto open.
#pragma once

#include <string>

#include "core/base/profiler.h"

namespace shoal {

/// JSON with one complete event per span, sorted by begin, outer spans first; the process is the rank.
/// zero_ns: the clock's reading at time 0; offset_ns is added to make the clock that of rank 0.
std::string trace_json(const Profiler& profiler, int rank, const std::string& title, int64_t zero_ns,
                       int64_t offset_ns);

}  // namespace shoal
