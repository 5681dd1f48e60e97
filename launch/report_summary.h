// The parts of the report page that are text: summary, warnings, configs. Internal to report.cpp.
#pragma once

#include <string>
#include <vector>

#include "launch/report_data.h"

namespace shoal {

/// Key figures; one run as tiles, several as a table with a column for each.
std::string report_summary(const std::vector<RunData>& runs);
/// What was left out or went wrong; "" when nothing.
std::string report_warnings(const std::vector<RunData>& runs);
/// Config keys whose values differ between the runs; "" when none.
std::string report_differences(const std::vector<RunData>& runs);
/// All config values of each run, folded.
std::string report_configs(const std::vector<RunData>& runs);

/// The last finite value of a column; NaN when there is none.
double last_value(const RunData& run, const char* column);

}  // namespace shoal
