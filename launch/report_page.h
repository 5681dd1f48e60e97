// The frame of the report page: style sheet for light, dark and print, and the small script that shows values
// under the mouse. The page is complete without the script.
#pragma once

#include <string>

namespace shoal {

constexpr int kNumRunColours = 8;

/// The page around `body`, which is HTML; `title` is plain text.
std::string html_page(const std::string& title, const std::string& body);

/// CSS colour of run or series number i.
std::string run_colour(size_t i);
/// CSS colour of item i of n ordered ones (layers), from dark to bright.
std::string ramp_colour(size_t i, size_t n);
/// The colour key of the expert-load heat maps.
std::string heat_legend();

}  // namespace shoal
