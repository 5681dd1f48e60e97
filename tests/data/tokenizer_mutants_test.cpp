// Hundreds of damaged tokenizer.json files: each is refused with its name and a place, or still gives back
// every byte of a text.
#include <gtest/gtest.h>

#include <cstdio>
#include <limits>

#include "core/base/error.h"
#include "core/base/random.h"
#include "data/bpe_trainer.h"
#include "data/tokenizer_json.h"
#include "tests/data/temp_folder.h"

namespace shoal {
namespace {

using nlohmann::ordered_json;
using testing::error_of;

std::string base_file(const std::string& regex) {
  BpeOptions options;
  options.vocab_size = 290;
  options.regex = regex;
  options.special_tokens = {"<s>"};
  BpeTrainer trainer(options);
  const std::string_view text = "the cat and the hat \xC3\xA9 sat on \"the\" mat\\ \n\n 123 the hat";
  trainer.add({&text, 1});
  ordered_json root = ordered_json::parse(trainer.train().tokenizer->to_json());
  const auto size = root["model"]["vocab"].size();
  root["added_tokens"].push_back({{"id", size}, {"content", "  "}, {"special", false}});
  root["post_processor"] = ordered_json::parse(
      R"({"type": "TemplateProcessing",
          "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
          "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}})");
  return root.dump(1);
}

std::vector<std::string> probes() {
  std::vector<std::string> texts = {"", "the cat  sat on the hat", "  ", "<|endoftext|><s>",
                                    "\xC4\xA0the \xC4\xA0"};
  for (int byte = 0; byte < 256; byte++) texts.emplace_back(1, static_cast<char>(byte));
  const RandomStream random(31, "probes");
  for (uint64_t i = 0; i < 20; i++) {
    std::string text;
    for (uint64_t j = 0; j < 40; j++) text += static_cast<char>(random.below(i * 40 + j, 256));
    texts.push_back(text);
    for (char& c : text) c = "the catdsno \n\xC4\xA0"[static_cast<unsigned char>(c) % 15];
    texts.push_back(text);
  }
  return texts;
}

/// True: refused. False: loaded, and every probe comes back.
bool refused_or_right(const std::string& text, const std::string& what) {
  static const std::vector<std::string> texts = probes();
  std::unique_ptr<Tokenizer> tokenizer;
  try {
    tokenizer = tokenizer_from_json(text, "tok.json");
  } catch (const UsageError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("tok.json: "), std::string::npos) << what << ": " << message;
    EXPECT_LT(message.size(), 1000U) << what;
    return true;
  } catch (const std::exception& error) {
    ADD_FAILURE() << what << ": not a UsageError: " << error.what();
    return true;
  }
  for (const std::string& probe : texts) {
    const auto ids = tokenizer->encode(probe);
    EXPECT_EQ(tokenizer->decode(ids), probe) << what;
    std::vector<int32_t> special;
    encode_with_special_tokens(*tokenizer, probe, special);
    EXPECT_EQ(tokenizer->decode(special), probe) << what;
  }
  EXPECT_EQ(tokenizer_from_json(tokenizer->to_json(), "again")->vocab_size(), tokenizer->vocab_size())
      << what;
  return false;
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed, "tokenizer mutants") {}
  uint64_t below(uint64_t limit) { return random_.below(draw_++, limit); }

  /// A member or element at a random place, every level equally likely to be the last.
  ordered_json& place(ordered_json& root, std::string& path) {
    ordered_json* node = &root;
    while (node->is_structured() && !node->empty() && (node == &root || below(4) != 0)) {
      auto it = node->begin();
      std::advance(it, static_cast<ptrdiff_t>(below(node->size())));
      path += node->is_object() ? "/" + it.key() : str('/', it - node->begin());
      node = &*it;
    }
    return *node;
  }

  std::string structure(const std::string& file, std::string& what) {
    ordered_json root = ordered_json::parse(file);
    ordered_json& node = place(root, what);
    switch (below(5)) {
      case 0: {
        const std::vector<ordered_json> values = {nullptr,
                                                  true,
                                                  -1,
                                                  0,
                                                  5,
                                                  1.5,
                                                  1e308,
                                                  INT64_MAX,
                                                  UINT64_MAX,
                                                  "",
                                                  "x",
                                                  "the",
                                                  std::string("a\0b", 3),
                                                  std::string(3000, 'y'),
                                                  "\xC4\xA0the",
                                                  ordered_json::array(),
                                                  ordered_json::object(),
                                                  ordered_json::array({"t", "h"})};
        node = values[below(values.size())];
        what += " = " + node.dump().substr(0, 40);
        break;
      }
      case 1: {
        std::string other;
        const ordered_json copy = node;
        place(root, other) = copy;
        what += " copied to " + other;
        break;
      }
      case 2: {
        std::string other;
        const ordered_json copy = place(root, other);
        node = copy;
        what += " copied from " + other;
        break;
      }
      case 3:
        if (node.is_object()) node["surplus"] = below(300);
        if (node.is_array()) node.push_back(node.empty() ? ordered_json(1) : ordered_json(node[0]));
        if (node.is_number()) node = node.get<double>() + 1;
        if (node.is_string()) node = node.get<std::string>() + "h";
        what += " extended";
        break;
      default:
        if (node.is_structured() && !node.empty()) {
          auto it = node.begin();
          std::advance(it, static_cast<ptrdiff_t>(below(node.size())));
          node.erase(it);
        }
        what += " without one member";
    }
    return root.dump();
  }

  std::string text(std::string file, std::string& what) {
    const uint64_t at = below(file.size());
    what = str("byte ", at);
    switch (below(4)) {
      case 0:
        return file.substr(0, at);
      case 1:
        file[at] = static_cast<char>(file[at] ^ (1 << below(8)));
        return file;
      case 2:
        return file.insert(at, 1, static_cast<char>(below(256)));
      default:
        return file.erase(at, 1 + below(50));
    }
  }

 private:
  RandomStream random_;
  uint64_t draw_ = 0;
};

TEST(TokenizerMutants, FiveHundredMutantsAreRefusedOrGiveBackEveryByte) {
  for (const char* regex : {"gpt2", "llama3"}) {
    const std::string file = base_file(regex);
    ASSERT_FALSE(refused_or_right(file, "the file itself"));
    Mutator mutate(41);
    int refused = 0;
    for (int i = 0; i < 250; i++) {
      std::string what;
      const std::string mutant = i % 5 < 3 ? mutate.structure(file, what) : mutate.text(file, what);
      refused += refused_or_right(mutant, str(regex, " mutant ", i, ": ", what)) ? 1 : 0;
    }
    std::printf("seed 41, %s: 250 mutants: %d refused, %d loaded and right\n", regex, refused, 250 - refused);
    EXPECT_GT(refused, 100);
    EXPECT_LT(refused, 250);
  }
}

TEST(TokenizerMutants, HandMadeFaultsAreNamed) {
  using Change = std::function<void(ordered_json&)>;
  const std::vector<std::pair<Change, std::string>> cases = {
      {[](auto& j) { j.erase("model"); }, "model: expected BPE, got null"},
      {[](auto& j) { j["model"] = "BPE"; }, "model: expected BPE, got \"BPE\""},
      {[](auto& j) { j["model"]["vocab"] = ordered_json::array(); }, "model.vocab: expected an object"},
      {[](auto& j) { j["model"].erase("vocab"); }, "model.vocab: expected an object"},
      {[](auto& j) { j["model"]["vocab"] = ordered_json::object(); }, "model.vocab: "},
      {[](auto& j) { j["model"].erase("merges"); }, "model.merges: expected a list"},
      {[](auto& j) {
         j["model"]["merges"][2] = {"t", "qqq"};
       },
       "model.merges[2]: \"qqq\" is not in model.vocab"},
      {[](auto& j) {
         j["model"]["merges"][1] = {"t", 5};
       },
       "model.merges[1]: expected a pair of texts"},
      {[](auto& j) { j["model"]["vocab"]["th"] = 7; }, "id 7 belongs to both"},
      {[](auto& j) { j["model"]["vocab"]["A"] = 1000; }, " tokens, but \"A\" has id 1000"},
      {[](auto& j) { j["model"]["vocab"]["A"] = "12"; },
       "model.vocab: expected a token id in 0..16777215, got \"12\""},
      {[](auto& j) { j["model"]["vocab"]["A"] = UINT64_MAX; }, "expected a token id in 0..16777215"},
      {[](auto& j) { j["model"]["vocab"]["A"] = 1e30; }, "expected a token id in 0..16777215"},
      {[](auto& j) { j["model"]["ignore_merges"] = "yes"; },
       "model.ignore_merges: expected true or false, got \"yes\""},
      {[](auto& j) { j["added_tokens"][0]["special"] = 1; }, "special: expected true or false, got 1"},
      {[](auto& j) { j["added_tokens"] = 3; }, "added_tokens: expected a list"},
      {[](auto& j) { j["added_tokens"][0] = nullptr; }, "added_tokens: content: expected a text"},
      {[](auto& j) { j["added_tokens"][1]["id"] = 0; }, "id 0 here and 1 in model.vocab"},
      {[](auto& j) { j["added_tokens"][2]["id"] = 20; }, "id 20 belongs to both"},
      {[](auto& j) {
         // A special token with the text of a merged one: its bytes would be those of the text.
         for (const auto& [text, id] : j["model"]["vocab"].items())
           if (text.size() > 2 && text.starts_with("\xC4\xA0"))
             return j["added_tokens"].push_back({{"id", id}, {"content", text}});
       },
       "is an added token and must not be merged"},
      {[](auto& j) {
         j["added_tokens"].push_back({{"id", j["model"]["vocab"]["a"]}, {"content", "a"}});
       },
       "no token for byte 97"},
      {[](auto& j) {
         j["pre_tokenizer"] = {{"type", "Metaspace"}};
       },
       "pre_tokenizer: expected ByteLevel"},
      {[](auto& j) { j["pre_tokenizer"] = 7; }, "pre_tokenizer: expected ByteLevel"},
      {[](auto& j) { j["pre_tokenizer"]["use_regex"] = "no"; },
       "pre_tokenizer.use_regex: expected true or false"},
      {[](auto& j) {
         j["pre_tokenizer"] = ordered_json::parse(
             R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "(["}, "behavior":
                 "Isolated", "invert": false}, {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})");
       },
       "pre_tokenizer: Split: expected the gpt2 or the llama3 regex, got \"([\""},
      {[](auto& j) {
         j["normalizer"] = {{"type", "Lowercase"}};
       },
       "normalizer: not supported: \"Lowercase\""},
      {[](auto& j) { j["post_processor"]["single"][0]["SpecialToken"]["id"] = "<x>"; },
       "is not among added_tokens"},
      {[](auto& j) { j["post_processor"]["special_tokens"]["<s>"]["ids"] = {4}; },
       "post_processor: special_tokens: expected ids [1] for \"<s>\""},
      {[](auto& j) {
         j["post_processor"]["single"] = {1, 2};
       },
       "post_processor: TemplateProcessing: expected one"},
      {[](auto& j) { j[std::string(5000, 'k')] = 1; }, "...: unknown key"},
      {[](auto& j) { j["version"] = std::string(5000, 'v'); }, "version: expected \"1.0\", got \"vvv"},
  };
  const std::string file = base_file("gpt2");
  for (const auto& [change, expected] : cases) {
    ordered_json root = ordered_json::parse(file);
    change(root);
    const std::string error = error_of<UsageError>([&] { tokenizer_from_json(root.dump(), "tok.json"); });
    EXPECT_NE(error.find(expected), std::string::npos)
        << "expected '" << expected << "' in '" << error << "'";
    EXPECT_NE(error.find("tok.json: "), std::string::npos) << error;
    EXPECT_LT(error.size(), 1000U);
  }
}

TEST(TokenizerMutants, OtherThingsThanATokenizerAreRefused) {
  const std::string file = base_file("gpt2");
  std::string deep;
  for (int i = 0; i < 200000; i++) deep += "{\"a\":";
  for (const std::string& text :
       {std::string(), std::string("\0", 1), std::string("true"), std::string("{"),
        std::string("\xEF\xBB\xBF"), deep, std::string(100000, '9'),
        "{\"model\": " + std::string(100000, '9') + "}", "\"" + std::string(100000, 'x'),
        std::string("{\"version\": 1e999999}"), file + file, std::string("\x89HDF\r\n\x1a\n")})
    EXPECT_TRUE(refused_or_right(text, text.substr(0, 40)));
}

}  // namespace
}  // namespace shoal
