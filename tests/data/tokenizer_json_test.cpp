#include "data/tokenizer_json.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/base/error.h"
#include "data/bpe_trainer.h"
#include "tests/data/temp_folder.h"

namespace shoal {
namespace {

using nlohmann::ordered_json;
using testing::error_of;
using testing::TempFolder;

std::string trained_json(const std::string& regex = "gpt2", std::vector<std::string> special = {}) {
  BpeOptions options;
  options.vocab_size = 300;
  options.regex = regex;
  options.special_tokens = std::move(special);
  BpeTrainer trainer(options);
  const std::string_view text =
      "with other words in between, the cat and the hat \xC3\xA9 sat on \"the\" mat\\ \n\n 123";
  trainer.add({&text, 1});
  return trainer.train().tokenizer->to_json();
}

/// The error of loading a valid file after `damage`; "" when it loads.
std::string error_after(const std::function<void(ordered_json&)>& damage) {
  ordered_json root = ordered_json::parse(trained_json());
  damage(root);
  return error_of<UsageError>([&] { tokenizer_from_json(root.dump(), "tok.json"); });
}

TEST(TokenizerJson, SavedBpeLoadsWithTheSameIdsAndIsSavedUnchanged) {
  const TempFolder folder;
  for (const char* regex : {"gpt2", "llama3"}) {
    const std::string json = trained_json(regex, {"<|user|>"});
    const auto original = tokenizer_from_json(json, "memory");
    save_tokenizer(*original, folder / "tokenizer.json");
    const auto loaded = load_tokenizer(folder.path());
    EXPECT_EQ(loaded->to_json(), json);
    EXPECT_EQ(loaded->name(), "bpe");
    EXPECT_EQ(loaded->vocab_size(), 300);
    EXPECT_EQ(loaded->end_of_document(), 0);
    EXPECT_EQ(loaded->token_id("<|user|>"), 1);
    EXPECT_EQ(loaded->special_tokens().size(), 2U);
    const std::string text = "the \"cat\" \xC3\xA9 4567\\\n x\x80";
    EXPECT_EQ(loaded->encode(text), original->encode(text));
    EXPECT_EQ(loaded->decode(loaded->encode(text)), text);
  }
}

TEST(TokenizerJson, ReadsMergesInBothNotations) {
  ordered_json root = ordered_json::parse(trained_json());
  const auto pairs = tokenizer_from_json(root.dump(), "pairs");
  for (auto& merge : root["model"]["merges"]) {
    merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  }
  const auto strings = tokenizer_from_json(root.dump(), "strings");
  EXPECT_EQ(strings->encode("the cat sat"), pairs->encode("the cat sat"));
}

TEST(TokenizerJson, TemplateGivesTheBeginningOfDocument) {
  ordered_json root = ordered_json::parse(trained_json("llama3", {"<s>"}));
  root["post_processor"] = ordered_json::parse(
      R"({"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "TemplateProcessing",
          "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}]})");
  EXPECT_EQ(tokenizer_from_json(root.dump(), "t")->beginning_of_document(), 1);
}

TEST(TokenizerJson, AddedTokensThatAreNotSpecialAreMatchedInText) {
  ordered_json root = ordered_json::parse(trained_json());
  root["added_tokens"].push_back({{"id", 300}, {"content", "    "}, {"special", false}});
  root["added_tokens"].push_back({{"id", 301}, {"content", "        "}, {"special", false}});
  const auto t = tokenizer_from_json(root.dump(), "t");
  EXPECT_EQ(t->vocab_size(), 302);
  EXPECT_FALSE(t->can_cut_between_words());
  const auto ids = t->encode("            x");
  ASSERT_GE(ids.size(), 3U);
  EXPECT_EQ(ids[0], 301);
  EXPECT_EQ(ids[1], 300);
  EXPECT_EQ(t->decode(ids), "            x");
}

TEST(TokenizerJson, IgnoreMergesTakesWholeTokens) {
  ordered_json root = ordered_json::parse(trained_json("llama3"));
  const auto id = static_cast<int32_t>(root["model"]["vocab"].size());
  root["model"]["vocab"]["xyz"] = id;  // no merge leads to it
  EXPECT_NE(tokenizer_from_json(root.dump(), "t")->encode("xyz"), std::vector<int32_t>{id});
  root["model"]["ignore_merges"] = true;
  EXPECT_EQ(tokenizer_from_json(root.dump(), "t")->encode("xyz"), std::vector<int32_t>{id});
}

TEST(TokenizerJson, UnsupportedComponentsAreRefusedByName) {
  const std::vector<std::pair<std::function<void(ordered_json&)>, std::string>> cases = {
      {[](auto& j) {
         j["normalizer"] = {{"type", "NFC"}};
       },
       "normalizer: not supported: \"NFC\""},
      {[](auto& j) {
         j["truncation"] = {{"max_length", 5}};
       },
       "truncation: not supported"},
      {[](auto& j) {
         j["padding"] = {{"strategy", "x"}};
       },
       "padding: not supported"},
      {[](auto& j) { j["version"] = "2.0"; }, "version: expected \"1.0\""},
      {[](auto& j) { j["modle"] = 1; }, "modle: unknown key, did you mean 'model'?"},
      {[](auto& j) { j["model"]["type"] = "Unigram"; }, "model: expected BPE, got \"Unigram\""},
      {[](auto& j) { j["model"]["dropout"] = 0.1; }, "model.dropout: not supported"},
      {[](auto& j) { j["model"]["end_of_word_suffix"] = "</w>"; }, "model.end_of_word_suffix: not supported"},
      {[](auto& j) {
         j["pre_tokenizer"] = {{"type", "Whitespace"}};
       },
       "expected ByteLevel, or Split"},
      {[](auto& j) { j["pre_tokenizer"] = nullptr; }, "expected ByteLevel, or Split"},
      {[](auto& j) { j["pre_tokenizer"]["add_prefix_space"] = true; }, "add_prefix_space is not supported"},
      {[](auto& j) { j["pre_tokenizer"]["use_regex"] = false; }, "without use_regex"},
      {[](auto& j) {
         j["decoder"] = {{"type", "Metaspace"}};
       },
       "decoder: expected ByteLevel, got \"Metaspace\""},
      {[](auto& j) {
         j["post_processor"] = {{"type", "BertProcessing"}};
       },
       "got \"BertProcessing\""},
      {[](auto& j) { j["added_tokens"][0]["lstrip"] = true; }, "lstrip is not supported"},
  };
  for (const auto& [damage, expected] : cases) {
    const std::string error = error_after(damage);
    EXPECT_NE(error.find(expected), std::string::npos)
        << "expected '" << expected << "' in '" << error << "'";
    EXPECT_NE(error.find("tok.json"), std::string::npos) << error;
  }
}

TEST(TokenizerJson, UnknownSplitRegexIsRefused) {
  ordered_json root = ordered_json::parse(trained_json("llama3"));
  root["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "\\w+";
  const std::string error = error_of<UsageError>([&] { tokenizer_from_json(root.dump(), "t"); });
  EXPECT_NE(error.find("expected the gpt2 or the llama3 regex"), std::string::npos) << error;
}

TEST(TokenizerJson, BrokenTablesAreRefusedWithTheirPlace) {
  const std::vector<std::pair<std::function<void(ordered_json&)>, std::string>> cases = {
      {[](auto& j) { j["model"]["vocab"]["zz"] = 305; },
       "ids must be 0..300 for 301 tokens, but \"zz\" has id 305"},
      {[](auto& j) { j["model"]["vocab"]["zz"] = 5; }, "id 5 belongs to both"},
      {[](auto& j) { j["model"]["vocab"]["zz"] = -1; }, "expected a token id in 0.."},
      {[](auto& j) { j["model"]["vocab"]["zz"] = 1.5; }, "expected a token id in 0.."},
      {[](auto& j) { j["model"]["vocab"]["zz"] = 9999999999; }, "expected a token id in 0.."},
      {[](auto& j) { j["model"]["vocab"]["z z"] = 300; }, "characters that stand for no byte"},
      {[](auto& j) { j["model"]["vocab"][std::string("z\0", 2)] = 300; },
       "characters that stand for no byte"},
      {[](auto& j) { j["model"]["vocab"][""] = 300; }, "characters that stand for no byte"},
      {[](auto& j) { j["model"]["vocab"].erase("a"); }, "ids must be 0..298"},
      {[](auto& j) {
         j["model"]["merges"].push_back({"zz", "a"});
       },
       "\"zz\" is not in model.vocab"},
      {[](auto& j) {
         j["model"]["merges"].push_back({"a", "!"});
       },
       "\"a!\" is not in model.vocab"},
      {[](auto& j) { j["model"]["merges"].push_back(j["model"]["merges"][0]); },
       "the same pair as model.merges[0]"},
      {[](auto& j) { j["model"]["merges"].push_back("a b c"); }, "expected two tokens with one space"},
      {[](auto& j) { j["model"]["merges"].push_back(3); }, "expected a pair of texts"},
      {[](auto& j) { j["model"]["merges"] = nullptr; }, "model.merges: expected a list"},
      {[](auto& j) {
         j["added_tokens"].push_back({{"id", 300}, {"content", ""}});
       },
       "expected a text"},
      {[](auto& j) {
         j["added_tokens"].push_back({{"content", "qq"}});
       },
       "expected a token id"},
      {[](auto& j) { j["added_tokens"].push_back(j["added_tokens"][0]); }, "is listed twice"},
      {[](auto& j) { j["added_tokens"][0]["id"] = 300; }, "has id 300 here and 0 in model.vocab"},
      {[](auto& j) {
         j["added_tokens"].push_back({{"id", 300}, {"content", std::string("a\0", 2)}});
       },
       "no NUL"},
  };
  for (const auto& [damage, expected] : cases) {
    const std::string error = error_after(damage);
    EXPECT_NE(error.find(expected), std::string::npos)
        << "expected '" << expected << "' in '" << error << "'";
  }
}

TEST(TokenizerJson, HostileJsonIsRefused) {
  const auto error = [](const std::string& text) {
    return error_of<UsageError>([&] { tokenizer_from_json(text, "t"); });
  };
  EXPECT_NE(error("").find("not valid JSON"), std::string::npos);
  EXPECT_NE(error("{\"model\": \"\xFF\"}").find("not valid JSON"), std::string::npos);
  EXPECT_NE(error("[]").find("expected a JSON object"), std::string::npos);
  EXPECT_NE(error(std::string(100000, '[')).find("levels of nesting"), std::string::npos);
  EXPECT_NE(error(R"({"version": "1.0", "version": "1.0"})").find("appears twice"), std::string::npos);
  EXPECT_NE(error(R"({"shoal_tokenizer": "word", "version": 1})").find("expected \"byte\" or \"char\""),
            std::string::npos);
  EXPECT_NE(error(R"({"shoal_tokenizer": "byte", "version": 2})").find("version: expected 1"),
            std::string::npos);
  EXPECT_NE(
      error(R"({"shoal_tokenizer": "char", "version": 1, "characters": "ba"})").find("code point order"),
      std::string::npos);
  const std::string valid = trained_json();
  for (size_t cut = 1; cut < valid.size(); cut += 97)
    EXPECT_NE(error(valid.substr(0, valid.size() - cut - 1)), "");
}

TEST(TokenizerJson, MissingFileIsAUsageError) {
  const TempFolder folder;
  EXPECT_NE(error_of<UsageError>([&] { load_tokenizer(folder / "none.json"); }).find("no such file"),
            std::string::npos);
  EXPECT_NE(error_of<UsageError>([&] { load_tokenizer(folder.path()); }).find("no tokenizer.json"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal
