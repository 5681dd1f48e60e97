#include "parallel/collective_failpoint.h"

#include <array>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "core/base/error.h"
#include "parallel/bootstrap.h"

namespace shoal {

namespace {

struct Failpoint {
  int64_t rank = 0, number = 0;
  std::string group, call;
};

bool parse(std::string_view text, int64_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc{} && end == text.data() + text.size() && number >= 0;
}

std::optional<Failpoint> failpoint_of(const char* value) {
  if (value == nullptr || *value == '\0') return std::nullopt;
  std::array<std::string, 4> parts;
  size_t part = 0;
  for (const char* c = value; *c != '\0'; c++) {
    if (*c == ':') {
      part++;
    } else if (part < parts.size()) {
      parts[part] += *c;
    }
  }
  Failpoint point;
  point.group = parts[1];
  point.call = parts[2];
  if (part != 3 || !parse(parts[0], point.rank) || !parse(parts[3], point.number)) {
    throw UsageError(
        str("SHOAL_COLLECTIVE_FAILPOINT: expected <rank>:<group>:<call>:<number>, e.g. 1:ep:all_to_all:7, "
            "got '",
            value, "'"));
  }
  return point;
}

thread_local int depth = 0;

}  // namespace

CollectivePoint::CollectivePoint(const std::string& group, const CollectiveSignature& signature) {
  static const std::optional<Failpoint> point = failpoint_of(std::getenv("SHOAL_COLLECTIVE_FAILPOINT"));
  static const int rank = launch_info().rank;
  static thread_local int64_t passed = 0;
  static thread_local std::string before;
  if (depth++ > 0 || !point || rank != point->rank || group != point->group ||
      !signature.text().starts_with(point->call))
    return;
  if (passed++ == point->number) {
    std::fprintf(stderr, "failpoint: rank %d is killed in call %ld of %s, %s, after%s\n", rank,
                 static_cast<long>(point->number), group.c_str(), signature.text().c_str(), before.c_str());
    std::fflush(stderr);
    std::raise(SIGKILL);
  }
  before = str(' ', signature.dtype, before).substr(0, 40);
}

CollectivePoint::~CollectivePoint() {
  depth--;
}

}  // namespace shoal
