// Small text helpers shared by errors, config and console output.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shoal {

/// The candidate with the smallest edit distance to `word`, or "" when none is close enough to be a typo.
std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates);

/// ", did you mean 'x'?" or "".
std::string suggest(std::string_view word, const std::vector<std::string>& candidates);

/// A value as it appears in an error message: at most about 60 bytes, one line.
std::string shown(std::string_view text);

std::string join(const std::vector<std::string>& items, std::string_view separator);  // "a, b, c"

/// "rank 3", "ranks 0-2, 5" for ascending ranks.
std::string rank_list(const std::vector<int>& ranks);

/// 1234567 -> "1.23 M"; 950 -> "950".
std::string human_count(double value);
/// Bytes with binary units: "1.50 GiB".
std::string human_bytes(int64_t bytes);
/// Seconds as "3.2 s", "4 min 05 s", "1 h 02 min".
std::string human_duration(double seconds);

}  // namespace shoal
