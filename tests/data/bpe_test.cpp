#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/base/random.h"
#include "core/base/threads.h"
#include "data/bpe_tokenizer.h"
#include "data/bpe_trainer.h"
#include "tests/data/temp_folder.h"

namespace shoal {
namespace {

using testing::error_of;

TrainedTokenizer train(const std::vector<std::string_view>& texts, int64_t vocab_size,
                       const std::string& regex = "gpt2", int64_t min_frequency = 0) {
  BpeOptions options;
  options.vocab_size = vocab_size;
  options.regex = regex;
  options.min_frequency = min_frequency;
  BpeTrainer trainer(options);
  trainer.add(texts);
  return trainer.train();
}

// Words over a small alphabet with line ends and odd characters.
std::string random_text(uint64_t seed, size_t words) {
  static const std::vector<std::string> parts = {"a", "b",  "ab", "na", "the",         "\xC3\xA9",
                                                 "1", "--", "\n", "'s", "\xE4\xB8\xAD"};
  const RandomStream random(seed, "text");
  std::string text;
  for (uint64_t i = 0; i < words; i++) {
    const uint64_t repeats = 1 + random.below(3 * i, 4);
    for (uint64_t r = 0; r < repeats; r++) text += parts[random.below(3 * i + 1, parts.size())];
    if (random.below(3 * i + 2, 3) > 0) text += ' ';
  }
  return text;
}

/// The definition: cut, then join the pair of the lowest rank, leftmost first, until there is none.
std::vector<int32_t> encode_naively(const BpeModel& model, const std::string& text) {
  std::map<std::pair<int32_t, int32_t>, size_t> ranks;
  for (size_t r = 0; r < model.merges.size(); r++) ranks[{model.merges[r].left, model.merges[r].right}] = r;
  std::map<std::string, int32_t> byte_ids;
  for (size_t id = model.added.size(); id < model.tokens.size(); id++) byte_ids.emplace(model.tokens[id], id);
  std::vector<int32_t> out;
  for_each_pre_token(model.regex, text, [&](std::string_view piece) {
    std::vector<int32_t> ids;
    for (const char c : piece) ids.push_back(byte_ids.at(std::string(1, c)));
    while (true) {
      size_t best = ranks.size(), at = 0;
      for (size_t i = 0; i + 1 < ids.size(); i++) {
        const auto found = ranks.find({ids[i], ids[i + 1]});
        if (found != ranks.end() && found->second < best) {
          best = found->second;
          at = i;
        }
      }
      if (best == ranks.size()) break;
      ids[at] = model.merges[best].result;
      ids.erase(ids.begin() + static_cast<ptrdiff_t>(at) + 1);
    }
    out.insert(out.end(), ids.begin(), ids.end());
  });
  return out;
}

TEST(Bpe, EncodeEqualsTheDefinitionForShortLongAndRepeatedPieces) {
  for (const char* regex : {"gpt2", "llama3"}) {
    const std::string text = random_text(1, 3000);
    const auto trained = train({text}, 700, regex);
    const auto& bpe = dynamic_cast<const BpeTokenizer&>(*trained.tokenizer);
    std::string odd = random_text(2, 500);
    for (const size_t length : {31, 32, 33, 63, 64, 65, 200})
      odd += " " + std::string(length, 'a') + std::string(length, '-');
    for (int i = 0; i < 40; i++) odd += "ananab" + std::string(static_cast<size_t>(i % 7), 'b');
    const auto expected = encode_naively(bpe.model(), odd);
    EXPECT_EQ(bpe.encode(odd), expected) << regex;
    EXPECT_EQ(bpe.encode(odd), expected) << regex << ", with a warm cache";
    EXPECT_EQ(bpe.decode(expected), odd);
  }
}

TEST(Bpe, TK_01_InvalidUtf8RoundTrips) {
  const auto trained = train({random_text(3, 500)}, 400);
  std::vector<std::string> inputs = {"\x80",     std::string("\xC0\x80"),  "\xED\xA0\x80",
                                     "\xE2\x82", "\xF5\x80\x80\x80",       std::string(1, '\0'),
                                     "\xFF\xFE", "a\x80 b\xC0\x80 \n\xFF", ""};
  const std::string emoji = "x\xF0\x9F\x91\xA8y";
  for (size_t cut = 0; cut <= emoji.size(); cut++) {
    inputs.push_back(emoji.substr(0, cut));
    inputs.push_back(emoji.substr(cut));
  }
  const RandomStream random(5, "bytes");
  for (uint64_t round = 0; round < 200; round++) {
    std::string bytes;
    for (uint64_t i = 0; i < round; i++) bytes += static_cast<char>(random.bits(round * 1000 + i) & 0xFF);
    inputs.push_back(bytes);
  }
  for (const auto& input : inputs)
    EXPECT_EQ(trained.tokenizer->decode(trained.tokenizer->encode(input)), input);
}

TEST(Bpe, TK_05_StopsEarlyAndSaysSoWhenNothingIsLeftToMerge) {
  const std::vector<std::pair<std::string, int64_t>> cases = {
      {"", 257}, {"   ", 259}, {"ab", 258}, {"x", 257}};
  for (const auto& [text, size] : cases) {
    const auto trained = train({text}, 300);
    EXPECT_EQ(trained.tokenizer->vocab_size(), size) << "'" << text << "'";
    EXPECT_NE(trained.note.find(str("has ", size, " tokens instead of 300")), std::string::npos)
        << trained.note;
    EXPECT_EQ(trained.tokenizer->decode(trained.tokenizer->encode("ab   ")), "ab   ");
  }
  EXPECT_EQ(train({random_text(1, 3000)}, 300).note, "");
}

TEST(Bpe, TK_05_RefusesAVocabularySmallerThanBytesAndSpecials) {
  BpeOptions options;
  options.vocab_size = 257;
  options.special_tokens = {"<|user|>"};
  const std::string error = error_of<UsageError>([&] { BpeTrainer trainer(options); });
  EXPECT_NE(error.find("expected at least 258 (2 special tokens + 256 bytes), got 257"), std::string::npos)
      << error;
  options.vocab_size = 300;
  options.special_tokens = {"<a>", "<a>"};
  EXPECT_NE(error_of<UsageError>([&] { BpeTrainer trainer(options); }).find("'<a>' is listed twice"),
            std::string::npos);
}

TEST(Bpe, TK_09_SpacesAndLineEndsAreKept) {
  for (const char* regex : {"gpt2", "llama3"}) {
    const auto trained = train({"a  b\n a b\n"}, 260, regex);
    for (const std::string text : {"a  b\n", "  a", " ", "\n\n", "\t \r\n x  ", "a b  "}) {
      EXPECT_EQ(trained.tokenizer->decode(trained.tokenizer->encode(text)), text);
    }
  }
}

TEST(Bpe, LongRunsOfSpacesTakeLinearTimeAndRoundTrip) {
  const auto trained = train({random_text(4, 500) + std::string(64, ' ')}, 400);
  const std::string spaces(2'000'000, ' ');  // a quadratic method would take hours
  EXPECT_EQ(trained.tokenizer->decode(trained.tokenizer->encode(spaces + "x")), spaces + "x");
}

TEST(Bpe, TrainingDoesNotDependOnThreadsOrderOrGrouping) {
  std::vector<std::string> lines;
  for (uint64_t i = 0; i < 40; i++) lines.push_back(random_text(i, 50) + "\n");
  const auto json_of = [&](int threads, bool reversed, bool one_by_one) {
    std::vector<std::string_view> views(lines.begin(), lines.end());
    if (reversed) std::reverse(views.begin(), views.end());
    BpeOptions options;
    options.vocab_size = 600;
    BpeTrainer trainer(options);
    const int before = num_threads();
    set_num_threads(threads);
    if (one_by_one) {
      for (const auto& view : views) trainer.add({&view, 1});
    } else {
      trainer.add(views);
    }
    set_num_threads(before);
    return trainer.train().tokenizer->to_json();
  };
  const std::string expected = json_of(1, false, false);
  EXPECT_EQ(json_of(16, false, false), expected);
  EXPECT_EQ(json_of(3, true, true), expected);
}

TEST(Bpe, TiesGoToTheSmallerIdsAndMinFrequencyStopsTraining) {
  // "ab" and "cd" both occur twice: (a, b) has the smaller ids. "ef" occurs once.
  const auto trained = train({"cd ab ab cd ef"}, 400, "gpt2", 2);
  const auto& model = dynamic_cast<const BpeTokenizer&>(*trained.tokenizer).model();
  ASSERT_GE(model.merges.size(), 2U);
  EXPECT_EQ(model.tokens[static_cast<size_t>(model.merges[0].result)], "ab");
  EXPECT_EQ(model.tokens[static_cast<size_t>(model.merges[1].result)], "cd");
  EXPECT_FALSE(trained.tokenizer->token_id("ef"));
  EXPECT_NE(trained.note.find("at least 2 times"), std::string::npos) << trained.note;
}

TEST(Bpe, DT_13_EndTokenInsideTextIsOrdinaryTextUnlessAskedFor) {
  const auto trained = train({"some text"}, 300);
  const Tokenizer& t = *trained.tokenizer;
  ASSERT_EQ(t.end_of_document(), 0);
  const std::string text = "a<|endoftext|>b<|endof";
  const auto plain = t.encode(text);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), 0), 0);
  EXPECT_EQ(t.decode(plain), text);
  std::vector<int32_t> ids;
  encode_with_special_tokens(t, text, ids);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 0), 1);
  EXPECT_EQ(ids[1], 0);
  EXPECT_EQ(t.decode(ids), text);
}

TEST(Bpe, SeveralThreadsEncodeWithOneTokenizer) {
  const auto trained = train({random_text(1, 2000)}, 500);
  const std::string text = random_text(9, 2000);
  const auto expected = trained.tokenizer->encode(text);
  std::vector<std::vector<int32_t>> results(8);
  std::vector<std::thread> threads;
  for (auto& ids : results) {
    threads.emplace_back([&trained, &text, &ids] { trained.tokenizer->encode(text, ids); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& ids : results) EXPECT_EQ(ids, expected);
}

TEST(Bpe, CuttingBetweenWordsChangesNothing) {
  const std::string text = random_text(11, 400) + "the 'said  x\n\n a b";
  for (const char* regex : {"gpt2", "llama3"}) {
    const auto trained = train({text}, 500, regex);
    const auto whole = trained.tokenizer->encode(text);
    for (size_t i = 1; i < text.size(); i++) {
      if ((text[i] != ' ' && text[i] != '\n') || std::isalpha(static_cast<unsigned char>(text[i - 1])) == 0)
        continue;
      auto ids = trained.tokenizer->encode(std::string_view(text).substr(0, i));
      trained.tokenizer->encode(std::string_view(text).substr(i), ids);
      ASSERT_EQ(ids, whole) << "cut at " << i;
    }
  }
}

TEST(Bpe, TokenIdOutsideTheVocabularyIsAnError) {
  const auto trained = train({"ab"}, 258);
  EXPECT_NE(error_of<Error>([&] { trained.tokenizer->token_bytes(258); }).find("0..257, got 258"),
            std::string::npos);
  EXPECT_NE(error_of<Error>([&] { trained.tokenizer->token_bytes(-1); }).find("got -1"), std::string::npos);
}

}  // namespace
}  // namespace shoal
