// What line charts and heat maps share: sizes, scales and the horizontal axis. Internal to launch/svg_*.cpp.
#pragma once

#include <cmath>
#include <string>

namespace shoal {

// In SVG units, about one CSS pixel each.
constexpr double kWidth = 560, kChartHeight = 270, kLeft = 56, kRight = 14, kTop = 10, kBottom = 42;

/// Maps values to a range of SVG units.
struct Scale {
  double low = 0, high = 1;   // values; both positive when log
  double begin = 0, end = 1;  // SVG units of low and high
  bool log = false;
  double operator()(double value) const {
    const double share = log ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
    return begin + share * (end - begin);
  }
};

/// The horizontal axis at height `bottom`.
std::string horizontal_axis(const Scale& x, double bottom, const std::string& label);

}  // namespace shoal
