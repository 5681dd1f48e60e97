// Console and per-rank log lines. Rank 0 talks to the user on stdout; warnings of any rank go to stderr with
// the rank in front; when a run folder is set every rank also appends to <folder>/log/rank-N.log.
#pragma once

#include <string>

#include "core/base/error.h"

namespace shoal::log {

/// Sets this process's (or, with ranks as threads, this thread's) rank. Default: rank 0 of 1.
void set_rank(int rank, int world_size);
int rank();
/// Starts the per-rank file; "" stops it. Throws Error when the file cannot be opened.
void set_folder(const std::string& folder);
/// No console output at all (tests).
void set_quiet(bool quiet);

/// Columns of the terminal that shows this process's output, for status(); 0, the default: there is none.
void set_terminal_columns(int columns);
int terminal_columns();
/// On a terminal, and on rank 0: a line that the next one replaces, cut to the terminal's width; "" removes
/// it.
void status(const std::string& line);

void info_line(const std::string& line);   // stdout, rank 0 only; rank file
void warn_line(const std::string& line);   // stderr "warning: ...", any rank; rank file
void debug_line(const std::string& line);  // rank file only
/// The same for parts that are joined by str().
template <class... Parts>
void info(const Parts&... parts) {
  info_line(str(parts...));
}
template <class... Parts>
void warn(const Parts&... parts) {
  warn_line(str(parts...));
}
template <class... Parts>
void debug(const Parts&... parts) {
  debug_line(str(parts...));
}

}  // namespace shoal::log
