#include "data/tokenizer_json.h"

#include <set>

#include "data/byte_tokenizer.h"
#include "data/char_tokenizer.h"
#include "data/utf8.h"

namespace shoal {

namespace {

using nlohmann::json;
constexpr int kMaxDepth = 32;

/// The value as JSON, cut when it is long.
std::string excerpt(const json& value) {
  std::string text = value.dump();
  return text.size() <= 120 ? text : text.substr(0, valid_utf8_prefix(text.substr(0, 120))) + "...";
}

std::unique_ptr<Tokenizer> char_from_json(const json& root, const std::string& file) {
  const auto characters = root.find("characters");
  if (characters == root.end() || !characters->is_string()) {
    throw UsageError(str(file, ": characters: expected a string"));
  }
  const auto& text = characters->get_ref<const std::string&>();
  std::vector<uint32_t> code_points;
  for (const char *p = text.data(), *end = p + text.size(); p < end;) {
    uint32_t code = 0;
    const int length = decode_utf8(p, end, code);
    if (length == 0 || (!code_points.empty() && code <= code_points.back())) {
      throw UsageError(str(file, ": characters: expected distinct characters in code point order; byte ",
                           p - text.data(), " breaks it"));
    }
    code_points.push_back(code);
    p += length;
  }
  if (code_points.empty()) throw UsageError(str(file, ": characters: expected at least one"));
  const auto end_of_document = root.find("end_of_document");
  const bool has_end = end_of_document != root.end();
  if (has_end && !end_of_document->is_boolean()) {
    throw UsageError(str(file, ": end_of_document: expected true or false, got ", excerpt(*end_of_document)));
  }
  return std::make_unique<CharTokenizer>(std::move(code_points), has_end && end_of_document->get<bool>());
}

}  // namespace

json parse_strict_json(const std::string& text, const std::string& file) {
  std::vector<std::set<std::string>>
      keys;  // of the objects around the current place; lists have an empty set
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    using Event = json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (depth >= kMaxDepth)
        throw UsageError(str(file, ": expected at most ", kMaxDepth, " levels of nesting"));
      keys.emplace_back();
    } else if (event == Event::object_end || event == Event::array_end) {
      keys.pop_back();
    } else if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second)
        throw UsageError(str(file, ": the key ", excerpt(parsed), " appears twice"));
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::exception& e) {
    // The message quotes the text it stopped at, which may be all of the file.
    std::string why = e.what();
    if (why.size() > 300) why = why.substr(0, valid_utf8_prefix(why.substr(0, 300))) + "...";
    throw UsageError(str(file, ": not valid JSON: ", why));
  }
}

std::unique_ptr<Tokenizer> tokenizer_from_json(const std::string& text, const std::string& file) {
  const json root = parse_strict_json(text, file);
  if (!root.is_object()) throw UsageError(str(file, ": expected a JSON object"));
  const auto kind = root.find("shoal_tokenizer");
  if (kind == root.end()) return std::make_unique<BpeTokenizer>(bpe_from_json(root, text, file));
  if (root.value("version", json()) != json(1)) {
    throw UsageError(str(file, ": version: expected 1, got ", excerpt(root.value("version", json()))));
  }
  if (*kind == "byte") return std::make_unique<ByteTokenizer>();
  if (*kind == "char") return char_from_json(root, file);
  throw UsageError(str(file, ": shoal_tokenizer: expected \"byte\" or \"char\", got ", excerpt(*kind)));
}

}  // namespace shoal
