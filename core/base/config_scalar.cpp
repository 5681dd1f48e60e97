#include "core/base/config_scalar.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <system_error>

#include "core/base/error.h"
#include "core/base/text.h"

namespace shoal {

namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> words) {
  for (const auto word : words) {
    if (text == word) return true;
  }
  return false;
}

// [-+]? digits [. digits] [e [-+]? digits], with at least one mantissa digit.
struct Decimal {
  bool negative = false;
  bool integer_form = false;  // neither point nor exponent
  std::string digits;         // all mantissa digits
  int64_t exponent = 0;       // value = digits * 10^exponent
};

std::optional<Decimal> parse_decimal(std::string_view text) {
  Decimal out;
  size_t at = 0;
  if (at < text.size() && (text[at] == '+' || text[at] == '-')) out.negative = text[at++] == '-';
  while (at < text.size() && is_digit(text[at])) out.digits += text[at++];
  out.integer_form = at == text.size();
  if (at < text.size() && text[at] == '.') {
    at++;
    while (at < text.size() && is_digit(text[at])) {
      out.digits += text[at++];
      out.exponent--;
    }
  }
  if (out.digits.empty()) return std::nullopt;
  if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
    at++;
    const bool negative = at < text.size() && text[at] == '-';
    if (at < text.size() && (text[at] == '+' || text[at] == '-')) at++;
    if (at == text.size()) return std::nullopt;
    int64_t exponent = 0;
    // Anything past 1e9 is out of range whatever the digits are.
    for (; at < text.size() && is_digit(text[at]); at++) {
      if (exponent < 1'000'000'000) exponent = exponent * 10 + (text[at] - '0');
    }
    out.exponent += negative ? -exponent : exponent;
  }
  return at == text.size() ? std::optional(std::move(out)) : std::nullopt;
}

// 0x1F or 0o17: base and the digits after the prefix.
std::optional<std::pair<int, std::string_view>> prefixed_integer(std::string_view text) {
  if (text.size() < 3 || text[0] != '0' || (text[1] != 'x' && text[1] != 'o')) return std::nullopt;
  const int base = text[1] == 'x' ? 16 : 8;
  const std::string_view digits = text.substr(2);
  if (digits.find_first_not_of(base == 16 ? "0123456789abcdefABCDEF" : "01234567") != digits.npos) {
    return std::nullopt;
  }
  return std::pair(base, digits);
}

bool is_not_finite(std::string_view text) {
  if (is_one_of(text, {".nan", ".NaN", ".NAN"})) return true;
  if (!text.empty() && (text[0] == '+' || text[0] == '-')) text.remove_prefix(1);
  return is_one_of(text, {".inf", ".Inf", ".INF"});
}

bool is_null(std::string_view text) {
  return is_one_of(text, {"", "~", "null", "Null", "NULL"});
}

}  // namespace

std::optional<bool> parse_bool(std::string_view plain) {
  if (is_one_of(plain, {"true", "True", "TRUE"})) return true;
  if (is_one_of(plain, {"false", "False", "FALSE"})) return false;
  return std::nullopt;
}

ScalarType scalar_type(std::string_view plain) {
  if (is_null(plain)) return ScalarType::null;
  if (parse_bool(plain)) return ScalarType::boolean;
  if (is_not_finite(plain)) return ScalarType::not_finite;
  if (prefixed_integer(plain)) return ScalarType::integer;
  if (const auto decimal = parse_decimal(plain)) {
    return decimal->integer_form ? ScalarType::integer : ScalarType::number;
  }
  return ScalarType::text;
}

IntegerResult parse_integer(std::string_view plain, int64_t& value) {
  std::string digits;
  int base = 10;
  if (const auto prefixed = prefixed_integer(plain)) {
    base = prefixed->first;
    digits = prefixed->second;
  } else if (auto decimal = parse_decimal(plain)) {
    digits = std::move(decimal->digits);
    digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size()));
    for (; decimal->exponent < 0 && !digits.empty(); decimal->exponent++) {
      if (digits.back() != '0') return IntegerResult::not_integral;
      digits.pop_back();
    }
    if (digits.empty()) digits = "0";
    if (digits != "0") {
      if (decimal->exponent > 18) return IntegerResult::out_of_range;
      digits.append(static_cast<size_t>(decimal->exponent), '0');
    }
    if (decimal->negative) digits.insert(0, 1, '-');
  } else {
    return IntegerResult::not_a_number;
  }
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  return error == std::errc() ? IntegerResult::ok : IntegerResult::out_of_range;
}

NumberResult parse_number(std::string_view plain, double& value) {
  if (is_not_finite(plain)) return NumberResult::not_finite;
  if (prefixed_integer(plain)) {
    int64_t integer = 0;
    if (parse_integer(plain, integer) != IntegerResult::ok) return NumberResult::out_of_range;
    value = static_cast<double>(integer);
    return NumberResult::ok;
  }
  if (!parse_decimal(plain)) return NumberResult::not_a_number;
  if (plain[0] == '+') plain.remove_prefix(1);
  double parsed = 0;
  const auto [end, error] = std::from_chars(plain.data(), plain.data() + plain.size(), parsed);
  if (error != std::errc() || !std::isfinite(parsed)) return NumberResult::out_of_range;
  value = parsed;
  return NumberResult::ok;
}

std::string format_number(double value) {
  if (std::isnan(value)) return ".nan";
  if (std::isinf(value)) return value < 0 ? "-.inf" : ".inf";
  std::array<char, 40> buffer;
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  std::string text(buffer.data(), end);
  // to_chars writes 1e-05 and 1e+05: the sign '+' and the leading zero carry nothing.
  if (const size_t e = text.find('e'); e != text.npos) {
    size_t at = e + 1;
    if (text[at] == '+') {
      text.erase(at, 1);
    } else if (text[at] == '-') {
      at++;
    }
    while (at + 1 < text.size() && text[at] == '0') text.erase(at, 1);
  }
  return text;
}

std::string quote_if_needed(const std::string& text) {
  bool plain = !text.empty() && text[0] != '-' && text[0] != '.';
  for (const char c : text) {
    plain = plain &&
            (std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '/' || c == '-');
  }
  // YAML 1.1 readers take these for booleans.
  plain = plain && !is_one_of(text, {"y", "Y", "n", "N", "yes", "Yes", "YES", "no", "No", "NO", "on", "On",
                                     "ON", "off", "Off", "OFF"});
  if (plain && scalar_type(text) == ScalarType::text) return text;
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '$') {
      out += "$$";
    } else if (c == '\n') {
      out += "\\n";
    } else if (byte < 0x20 || byte == 0x7F) {
      std::array<char, 8> escape;
      std::snprintf(escape.data(), escape.size(), "\\x%02x", byte);
      out += escape.data();
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string describe_value(const ConfigNode& node) {
  switch (node.kind) {
    case ConfigNode::Kind::null:
      return "nothing";
    case ConfigNode::Kind::list:
      return str("a list of ", node.items.size());
    case ConfigNode::Kind::map:
      return "a map";
    case ConfigNode::Kind::scalar:
      break;
  }
  const ScalarType type = scalar_type(node.scalar);
  if (type == ScalarType::text || node.scalar.empty()) return "'" + shown(node.scalar) + "'";
  return node.quoted ? "the string '" + shown(node.scalar) + "'" : shown(node.scalar);
}

size_t find_bad_byte(std::string_view text, std::string& what) {
  for (size_t at = 0; at < text.size();) {
    const auto byte = static_cast<unsigned char>(text[at]);
    if (byte < 0x80) {
      if ((byte < 0x20 && byte != '\t' && byte != '\n' && byte != '\r') || byte == 0x7F) {
        what = byte == 0 ? "NUL byte" : str("control character ", int{byte});
        return at;
      }
      at++;
      continue;
    }
    what = "invalid UTF-8";
    const size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : 2;
    if (byte < 0xC2 || byte > 0xF4 || at + length > text.size()) return at;
    uint32_t code = byte & (0xFF >> (length + 1));
    for (size_t i = 1; i < length; i++) {
      const auto next = static_cast<unsigned char>(text[at + i]);
      if ((next & 0xC0) != 0x80) return at;
      code = code << 6 | (next & 0x3F);
    }
    constexpr std::array<uint32_t, 5> kSmallest = {0, 0, 0x80, 0x800, 0x10000};
    if (code < kSmallest[length] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return at;
    at += length;
  }
  return std::string_view::npos;
}

}  // namespace shoal
