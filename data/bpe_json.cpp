// tokenizer.json <-> BpeModel.
#include <algorithm>
#include <unordered_map>

#include "data/tokenizer_json.h"
#include "data/utf8.h"

namespace shoal {

namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr int64_t kMaxTokens = 1 << 24;

bool stands_for_itself(int byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

bool is_empty_text(const json& value) {
  return value.is_string() && value.get_ref<const std::string&>().empty();
}

/// byte -> the code point of its character.
const std::array<uint32_t, 256>& characters_of_bytes() {
  static const auto table = [] {
    std::array<uint32_t, 256> characters{};
    uint32_t next = 256;
    for (int byte = 0; byte < 256; byte++) {
      characters[static_cast<size_t>(byte)] = stands_for_itself(byte) ? static_cast<uint32_t>(byte) : next++;
    }
    return characters;
  }();
  return table;
}

std::string bytes_to_characters(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) append_utf8(characters_of_bytes()[static_cast<unsigned char>(c)], out);
  return out;
}

/// False when a character stands for no byte.
bool characters_to_bytes(std::string_view text, std::string& out) {
  static const auto bytes_of = [] {
    std::array<int, 324> table{};
    table.fill(-1);
    for (size_t byte = 0; byte < 256; byte++) table[characters_of_bytes()[byte]] = static_cast<int>(byte);
    return table;
  }();
  out.clear();
  const char* const end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    uint32_t code = 0;
    const int length = decode_utf8(p, end, code);
    if (length == 0 || code >= bytes_of.size() || bytes_of[code] < 0) return false;
    out += static_cast<char>(bytes_of[code]);
    p += length;
  }
  return true;
}

/// Reads one file; each function reads one component and refuses what it does not know, by name.
class Reader {
 public:
  Reader(const json& root, const std::string& file) : root_(root), file_(file) {}

  BpeModel read() {
    static const std::vector<std::string> known = {"version",        "truncation", "padding",
                                                   "added_tokens",   "normalizer", "pre_tokenizer",
                                                   "post_processor", "decoder",    "model"};
    for (const auto& [key, value] : root_.items()) {
      if (std::find(known.begin(), known.end(), key) == known.end())
        refuse(key.size() > 120 ? quoted(key) : key, "unknown key" + suggest(key, known));
    }
    if (member(root_, "version") != "1.0")
      refuse("version", "expected \"1.0\", got " + excerpt(member(root_, "version")));
    for (const char* key : {"truncation", "padding", "normalizer"}) {
      if (!member(root_, key).is_null()) refuse(key, "not supported: " + excerpt(member(root_, key)));
    }
    read_pre_tokenizer(member(root_, "pre_tokenizer"));
    read_decoder(member(root_, "decoder"));
    read_vocabulary(member(root_, "model"));
    read_added_tokens(member(root_, "added_tokens"));
    finish_tokens();
    read_merges(member(member(root_, "model"), "merges"));
    read_post_processor(member(root_, "post_processor"));
    return std::move(model_);
  }

 private:
  [[noreturn]] void refuse(const std::string& where, const std::string& what) const {
    throw UsageError(str("tokenizer ", file_, ": ", where, ": ", what));
  }
  static std::string excerpt(const json& value) {
    std::string text = value.is_object() && value.contains("type") ? value["type"].dump() : value.dump();
    if (text.size() > 120) text = text.substr(0, valid_utf8_prefix(text.substr(0, 120))) + "...";
    return text;
  }
  /// In quotes, with control characters escaped.
  static std::string quoted(const std::string& text) { return excerpt(json(text)); }
  /// The member, or null when it is absent.
  static const json& member(const json& object, const char* key) {
    static const json none;
    if (!object.is_object()) return none;
    const auto found = object.find(key);
    return found == object.end() ? none : *found;
  }
  /// The truth value under `key`; `fallback` when it is absent or null.
  bool flag(const json& object, const char* key, bool fallback, const std::string& where) const {
    const json& value = member(object, key);
    if (value.is_null()) return fallback;
    if (!value.is_boolean()) refuse(str(where, ".", key), "expected true or false, got " + excerpt(value));
    return value.get<bool>();
  }

  void read_pre_tokenizer(const json& value) {
    std::vector<const json*> steps;
    if (member(value, "type") == "Sequence" && member(value, "pretokenizers").is_array()) {
      for (const auto& step : member(value, "pretokenizers")) steps.push_back(&step);
    } else {
      steps.push_back(&value);
    }
    bool have_regex = false;
    if (steps.size() == 2 && member(*steps[0], "type") == "Split") {
      read_split(*steps[0]);
      have_regex = true;
      steps.erase(steps.begin());
    }
    if (steps.size() != 1 || member(*steps[0], "type") != "ByteLevel") {
      refuse("pre_tokenizer", "expected ByteLevel, or Split followed by ByteLevel, got " + excerpt(value));
    }
    if (flag(*steps[0], "add_prefix_space", true, "pre_tokenizer")) {
      refuse("pre_tokenizer", "ByteLevel with add_prefix_space is not supported");
    }
    if (flag(*steps[0], "use_regex", true, "pre_tokenizer") == have_regex) {
      refuse("pre_tokenizer", have_regex ? "ByteLevel after Split: expected use_regex false"
                                         : "ByteLevel without use_regex and without Split is not supported");
    }
  }

  void read_split(const json& split) {
    const json& pattern = member(member(split, "pattern"), "Regex");
    if (!pattern.is_string() || member(split, "behavior") != "Isolated" ||
        flag(split, "invert", false, "pre_tokenizer")) {
      refuse("pre_tokenizer", "Split: expected a Regex pattern, behavior Isolated and invert false");
    }
    for (const auto regex : {PreTokenRegex::gpt2, PreTokenRegex::llama3}) {
      if (pattern != pattern_of(regex)) continue;
      model_.regex = regex;
      return;
    }
    refuse("pre_tokenizer", "Split: expected the gpt2 or the llama3 regex, got " + excerpt(pattern));
  }

  void read_decoder(const json& value) const {
    if (!value.is_null() && member(value, "type") != "ByteLevel") {
      refuse("decoder", "expected ByteLevel, got " + excerpt(value));
    }
  }

  void read_vocabulary(const json& model) {
    if (!model.is_object() || member(model, "type") != "BPE")
      refuse("model", "expected BPE, got " + excerpt(model));
    const json& dropout = member(model, "dropout");
    if (!dropout.is_null() && dropout != 0.0) refuse("model.dropout", "not supported: " + excerpt(dropout));
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const json& value = member(model, key);
      if (!value.is_null() && !is_empty_text(value))
        refuse(str("model.", key), "not supported: " + excerpt(value));
    }
    // unk_token, fuse_unk and byte_fallback concern unknown bytes, and every byte must be a token here.
    model_.ignore_merges = flag(model, "ignore_merges", false, "model");
    const json& vocab = member(model, "vocab");
    if (!vocab.is_object()) refuse("model.vocab", "expected an object of token: id");
    for (const auto& [text, id] : vocab.items()) set_token(id, text, "model.vocab");
  }

  int64_t read_id(const json& id, const std::string& where) const {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= kMaxTokens) {
      refuse(where, str("expected a token id in 0..", kMaxTokens - 1, ", got ", excerpt(id)));
    }
    return id.get<int64_t>();
  }

  void set_token(const json& id_value, const std::string& text, const std::string& where) {
    const int64_t id = read_id(id_value, where);
    const auto [place, fresh] = texts_.emplace(id, text);
    if (!fresh && place->second != text) {
      refuse(where, str("id ", id, " belongs to both ", quoted(place->second), " and ", quoted(text)));
    }
    if (where == "model.vocab") vocab_.emplace(text, static_cast<int32_t>(id));
  }

  void read_added_tokens(const json& list) {
    if (list.is_null()) return;
    if (!list.is_array()) refuse("added_tokens", "expected a list");
    for (const auto& item : list) {
      const json& content = member(item, "content");
      if (!content.is_string() || is_empty_text(content))
        refuse("added_tokens", "content: expected a text, got " + excerpt(content));
      const auto& text = content.get_ref<const std::string&>();
      if (text.find('\0') != std::string::npos) refuse("added_tokens", "content: expected no NUL characters");
      const std::string where = str("added_tokens ", quoted(text));
      for (const char* key : {"single_word", "lstrip", "rstrip"}) {
        if (this->flag(item, key, false, where)) refuse(where, str(key, " is not supported"));
      }
      const auto known = vocab_.find(text);
      if (known != vocab_.end() && member(item, "id") != known->second) {
        refuse(where,
               str("has id ", excerpt(member(item, "id")), " here and ", known->second, " in model.vocab"));
      }
      set_token(member(item, "id"), text, where);
      const auto same = [&](const BpeModel::Added& other) { return other.text == text; };
      if (std::any_of(model_.added.begin(), model_.added.end(), same)) refuse(where, "is listed twice");
      model_.added.push_back({text, member(item, "id").get<int32_t>(), flag(item, "special", false, where)});
    }
    std::sort(model_.added.begin(), model_.added.end(),
              [](const auto& a, const auto& b) { return a.id < b.id; });
  }

  void finish_tokens() {
    const auto size = static_cast<int64_t>(texts_.size());
    model_.tokens.resize(texts_.size());
    std::vector<bool> added(texts_.size());
    for (const auto& [id, text] : texts_) {
      if (id >= size)
        refuse("model.vocab", str("ids must be 0..", size - 1, " for ", size, " tokens, but ", quoted(text),
                                  " has id ", id));
    }
    for (const auto& token : model_.added) added[static_cast<size_t>(token.id)] = true;
    std::array<bool, 256> have_byte{};
    for (const auto& [id, text] : texts_) {
      std::string& bytes = model_.tokens[static_cast<size_t>(id)];
      if (added[static_cast<size_t>(id)]) {
        bytes = text;
        continue;
      }
      if (text.empty() || !characters_to_bytes(text, bytes)) {
        refuse("model.vocab",
               str("token ", quoted(text), " (id ", id, ") has characters that stand for no byte"));
      }
      if (bytes.size() == 1) have_byte[static_cast<unsigned char>(bytes[0])] = true;
    }
    for (size_t byte = 0; byte < 256; byte++) {
      if (!have_byte[byte])
        refuse("model.vocab", str("no token for byte ", byte, "; expected all 256 (byte-level BPE)"));
    }
  }

  void read_merges(const json& list) {
    if (!list.is_array()) refuse("model.merges", "expected a list");
    std::unordered_map<uint64_t, size_t> seen;
    // The text of an added token stands for itself, so merging into one must give that very text.
    std::string bytes;
    std::unordered_map<int32_t, const BpeModel::Added*> literal;
    for (const auto& token : model_.added)
      if (!characters_to_bytes(token.text, bytes) || bytes != token.text) literal.emplace(token.id, &token);
    for (size_t rank = 0; rank < list.size(); rank++) {
      const json& item = list[rank];
      const std::string where = str("model.merges[", rank, "]");
      std::string left, right;
      if (item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string()) {
        left = item[0].get<std::string>();
        right = item[1].get<std::string>();
      } else if (item.is_string()) {
        const auto& text = item.get_ref<const std::string&>();
        const size_t space = text.find(' ');
        if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
          refuse(where, "expected two tokens with one space between, got " + quoted(text));
        }
        left = text.substr(0, space);
        right = text.substr(space + 1);
      } else {
        refuse(where, "expected a pair of texts, got " + excerpt(item));
      }
      const BpeMerge merge{token_of(left, where), token_of(right, where), token_of(left + right, where)};
      for (const int32_t id : {merge.left, merge.right, merge.result})
        if (const auto found = literal.find(id); found != literal.end())
          refuse(where, quoted(found->second->text) + " is an added token and must not be merged");
      const uint64_t pair =
          uint64_t{static_cast<uint32_t>(merge.left)} << 32 | static_cast<uint32_t>(merge.right);
      if (!seen.emplace(pair, rank).second)
        refuse(where, str("the same pair as model.merges[", seen[pair], "]"));
      model_.merges.push_back(merge);
    }
  }

  int32_t token_of(const std::string& text, const std::string& where) const {
    const auto found = vocab_.find(text);
    if (found == vocab_.end()) refuse(where, quoted(text) + " is not in model.vocab");
    return found->second;
  }

  void read_post_processor(const json& value) {
    if (value.is_null() || member(value, "type") == "ByteLevel") return;  // ByteLevel changes offsets only
    if (member(value, "type") == "Sequence" && member(value, "processors").is_array()) {
      for (const auto& step : member(value, "processors")) read_post_processor(step);
      return;
    }
    const json& single = member(value, "single");
    if (member(value, "type") != "TemplateProcessing" || !single.is_array()) {
      refuse("post_processor", "expected ByteLevel or TemplateProcessing, got " + excerpt(value));
    }
    if (single.size() == 1 && single[0].contains("Sequence")) return;
    const json name = single.size() == 2 ? member(member(single[0], "SpecialToken"), "id") : json();
    if (!name.is_string() || !single[1].contains("Sequence")) {
      refuse("post_processor",
             "TemplateProcessing: expected one special token before the text, got " + excerpt(single));
    }
    for (const auto& token : model_.added) {
      if (token.text == name) model_.beginning_of_document = token.id;
    }
    const json& details = member(member(value, "special_tokens"), name.get_ref<const std::string&>().c_str());
    if (model_.beginning_of_document && !details.is_null() &&
        member(details, "ids") != json::array({*model_.beginning_of_document})) {
      refuse("post_processor", str("special_tokens: expected ids [", *model_.beginning_of_document, "] for ",
                                   excerpt(name), " as in added_tokens, got ", excerpt(details)));
    }
    if (!model_.beginning_of_document) refuse("post_processor", excerpt(name) + " is not among added_tokens");
  }

  const json& root_;
  const std::string& file_;
  BpeModel model_;
  std::unordered_map<int64_t, std::string> texts_;  // of all ids, as in the file
  std::unordered_map<std::string, int32_t> vocab_;  // of model.vocab, as in the file
};

ordered_json byte_level(bool add_prefix_space, bool trim_offsets, bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", add_prefix_space},
          {"trim_offsets", trim_offsets},
          {"use_regex", use_regex}};
}

ordered_json pre_tokenizer_json(PreTokenRegex regex) {
  if (regex == PreTokenRegex::gpt2) return byte_level(false, true, true);
  ordered_json split = {{"type", "Split"},
                        {"pattern", {{"Regex", pattern_of(regex)}}},
                        {"behavior", "Isolated"},
                        {"invert", false}};
  return {{"type", "Sequence"},
          {"pretokenizers", ordered_json::array({split, byte_level(false, true, false)})}};
}

}  // namespace

std::array<uint8_t, 256> bytes_in_character_order() {
  std::array<uint8_t, 256> bytes{};
  for (size_t i = 0; i < 256; i++) bytes[i] = static_cast<uint8_t>(i);
  std::sort(bytes.begin(), bytes.end(),
            [](uint8_t a, uint8_t b) { return characters_of_bytes()[a] < characters_of_bytes()[b]; });
  return bytes;
}

BpeModel bpe_from_json(const json& root, const std::string& text, const std::string& file) {
  BpeModel model = Reader(root, file).read();
  model.file = text;
  return model;
}

std::string bpe_to_json(const BpeModel& model) {
  std::vector<std::string> texts(model.tokens.size());
  for (size_t id = 0; id < texts.size(); id++) texts[id] = bytes_to_characters(model.tokens[id]);
  ordered_json added = ordered_json::array();
  for (const auto& token : model.added) {
    texts[static_cast<size_t>(token.id)] = token.text;
    added.push_back({{"id", token.id},
                     {"content", token.text},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", token.special}});
  }
  // ordered_json finds keys by linear search, so the long vocabulary is written directly.
  std::string vocab;
  for (size_t id = 0; id < texts.size(); id++) {
    vocab += str(id == 0 ? "\n      " : ",\n      ", ordered_json(texts[id]).dump(), ": ", id);
  }
  std::string merges;
  for (size_t rank = 0; rank < model.merges.size(); rank++) {
    const auto& merge = model.merges[rank];
    const ordered_json pair = {texts[static_cast<size_t>(merge.left)],
                               texts[static_cast<size_t>(merge.right)]};
    merges += str(rank == 0 ? "\n      " : ",\n      ", pair.dump());
  }
  const ordered_json head = {{"version", "1.0"},
                             {"truncation", nullptr},
                             {"padding", nullptr},
                             {"added_tokens", added},
                             {"normalizer", nullptr},
                             {"pre_tokenizer", pre_tokenizer_json(model.regex)},
                             {"post_processor", byte_level(true, false, true)},
                             {"decoder", byte_level(true, true, true)}};
  std::string text = head.dump(2);
  text.resize(text.size() - 2);  // reopen the object: drop "\n}"
  text +=
      str(",\n  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": null,\n"
          "    \"continuing_subword_prefix\": null,\n    \"end_of_word_suffix\": null,\n    \"fuse_unk\": "
          "false,\n"
          "    \"byte_fallback\": false,\n    \"ignore_merges\": ",
          model.ignore_merges ? "true" : "false", ",\n    \"vocab\": {", vocab, "\n    },\n    \"merges\": [",
          merges, model.merges.empty() ? "]" : "\n    ]", "\n  }\n}\n");
  return text;
}

}  // namespace shoal
