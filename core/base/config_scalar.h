// Scalars of the YAML 1.2 core schema: what a plain scalar is, and how values are written so that they read
// back to the same bits. Internal to core/base/config*.cpp and yaml.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/config.h"

namespace shoal {

enum class ScalarType { null, boolean, integer, number, not_finite, text };

/// Type of a scalar written without quotes. `yes`, `no`, `on` and `off` are text.
ScalarType scalar_type(std::string_view plain);

/// true | True | TRUE | false | False | FALSE; empty for anything else.
std::optional<bool> parse_bool(std::string_view plain);

enum class IntegerResult { ok, not_a_number, not_integral, out_of_range };
/// Decimal, 0x and 0o integers, and decimals with an integral value (1e6, 2.0), all converted exactly.
IntegerResult parse_integer(std::string_view plain, int64_t& value);

enum class NumberResult { ok, not_a_number, not_finite, out_of_range };
NumberResult parse_number(std::string_view plain, double& value);  // decimal, or an integer as above

/// Shortest text that reads back to the same double: "0.1", "1e-5", "1000".
std::string format_number(double value);

/// The string as a YAML scalar for any position: plain when that reads back as the same string, else in
/// double quotes; '$' is doubled because ${env:...} is expanded when reading.
std::string quote_if_needed(const std::string& text);

/// "nothing", "12", "'abc'", "the string '12'", "a list of 3", "a map".
std::string describe_value(const ConfigNode& node);

/// Offset of the first byte that is no valid UTF-8 or is a control character other than tab and line ends,
/// with a description in `what`; npos when the text is clean.
size_t find_bad_byte(std::string_view text, std::string& what);

}  // namespace shoal
