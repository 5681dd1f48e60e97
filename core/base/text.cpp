#include "core/base/text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <numeric>

namespace shoal {

namespace {

// Damerau-Levenshtein distance (adjacent swaps count once), with '-' and '_' equal and case ignored.
int edit_distance(std::string_view a, std::string_view b) {
  auto same = [](char x, char y) {
    auto fold = [](char c) {
      return c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    };
    return fold(x) == fold(y);
  };
  const size_t m = b.size();
  std::vector<int> before(m + 1), previous(m + 1), current(m + 1);
  std::iota(previous.begin(), previous.end(), 0);
  for (size_t i = 1; i <= a.size(); i++) {
    current[0] = static_cast<int>(i);
    for (size_t j = 1; j <= m; j++) {
      const int substitute = previous[j - 1] + (same(a[i - 1], b[j - 1]) ? 0 : 1);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, substitute});
      if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1])) {
        current[j] = std::min(current[j], before[j - 2] + 1);
      }
    }
    std::swap(before, previous);
    std::swap(previous, current);
  }
  return previous[m];
}

}  // namespace

std::string nearest_name(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  // Two edits turn any word of two or three letters into almost any other.
  const size_t max_edits = word.size() <= 3 ? 1 : std::max<size_t>(2, word.size() / 3);
  int best_distance = static_cast<int>(max_edits) + 1;
  // Among equally near names the one that begins alike: few people mistype the first letter.
  const auto begins_alike = [&](const std::string& name) {
    return !word.empty() && !name.empty() && name[0] == word[0];
  };
  for (const auto& candidate : candidates) {
    const int distance = edit_distance(word, candidate);
    const bool tie = distance == best_distance && !best.empty();
    if (distance < best_distance || (tie && begins_alike(candidate) && !begins_alike(best))) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string suggest(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string best = nearest_name(word, candidates);
  return best.empty() ? "" : ", did you mean '" + best + "'?";
}

std::string shown(std::string_view text) {
  constexpr size_t kMaxBytes = 60;
  std::string out;
  for (size_t at = 0; at < text.size(); at++) {
    const auto byte = static_cast<unsigned char>(text[at]);
    // Cut only in front of a whole UTF-8 character.
    if (out.size() >= kMaxBytes && (byte & 0xC0) != 0x80) return out + "...";
    if (text[at] == '\n') {
      out += "\\n";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += '?';
    } else {
      out += text[at];
    }
  }
  return out;
}

std::string join(const std::vector<std::string>& items, std::string_view separator) {
  std::string out;
  for (size_t i = 0; i < items.size(); i++) {
    if (i > 0) out += separator;
    out += items[i];
  }
  return out;
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) end++;
    if (i > 0) out += ", ";
    out += std::to_string(ranks[i]);
    if (end - i > 1) out += (end - i > 2 ? "-" : ", ") + std::to_string(ranks[end - 1]);
    i = end;
  }
  return out;
}

std::string human_count(double value) {
  static constexpr const char* kUnits[] = {"", " K", " M", " G", " T", " P"};
  size_t unit = 0;
  while (std::abs(value) >= 1000 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    unit++;
  }
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, unit == 0 ? "%.0f%s" : "%.2f%s", value, kUnits[unit]);
  return buffer;
}

std::string human_bytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    unit++;
  }
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return buffer;
}

std::string human_duration(double seconds) {
  char buffer[64];
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (seconds < 59.95) {
    std::snprintf(buffer, sizeof buffer, "%.1f s", seconds);
  } else if (whole < 3600) {
    std::snprintf(buffer, sizeof buffer, "%ld min %02ld s", static_cast<long>(whole / 60),
                  static_cast<long>(whole % 60));
  } else {
    std::snprintf(buffer, sizeof buffer, "%ld h %02ld min", static_cast<long>(whole / 3600),
                  static_cast<long>(whole % 3600 / 60));
  }
  return buffer;
}

}  // namespace shoal
