#include "data/tokenizer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/error.h"
#include "tests/data/temp_folder.h"

namespace shoal {
namespace {

using testing::error_of;
using testing::TempFolder;

std::unique_ptr<Tokenizer> train(const Choice& choice, std::string_view text) {
  const auto trainer = TokenizerTrainerRegistry::make(choice);
  if (trainer->needs_text()) trainer->add({&text, 1});
  return trainer->train().tokenizer;
}

TEST(Tokenizer, TheFourKindsAreRegistered) {
  const std::vector<std::string> expected = {"bpe", "byte", "char", "file"};
  EXPECT_EQ(TokenizerTrainerRegistry::instance().names(), expected);
}

TEST(ByteTokenizer, TK_01_EveryByteRoundTripsAndTheEndIs256) {
  const auto t = train({"byte", nullptr}, "");
  std::string all;
  for (int byte = 0; byte < 256; byte++) all += static_cast<char>(byte);
  const auto ids = t->encode(all);
  for (int byte = 0; byte < 256; byte++) EXPECT_EQ(ids[static_cast<size_t>(byte)], byte);
  EXPECT_EQ(t->decode(ids), all);
  EXPECT_EQ(t->vocab_size(), 257);
  EXPECT_EQ(t->end_of_document(), 256);
  EXPECT_EQ(t->token_bytes(256), kEndOfDocumentText);
  EXPECT_NE(error_of<Error>([&] { t->token_bytes(257); }).find("0..256, got 257"), std::string::npos);
}

TEST(CharTokenizer, IdsFollowCodePointOrder) {
  const auto t = train({"char", nullptr},
                       "b\xC3\xA9"
                       "a\nb");
  EXPECT_EQ(t->vocab_size(), 4);
  EXPECT_EQ(t->encode("\nab\xC3\xA9"), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(t->decode(t->encode("ab\xC3\xA9\n")), "ab\xC3\xA9\n");
  EXPECT_FALSE(t->end_of_document());
  EXPECT_EQ(t->token_id("b"), 2);
  EXPECT_FALSE(t->token_id("c"));
}

TEST(CharTokenizer, EndOfDocumentIsAddedWhenAskedFor) {
  auto options = std::make_shared<CharOptions>();
  options->end_of_document = true;
  const auto t = train({"char", options}, "ab");
  EXPECT_EQ(t->vocab_size(), 3);
  EXPECT_EQ(t->end_of_document(), 2);
  EXPECT_EQ(t->token_bytes(2), kEndOfDocumentText);
}

TEST(CharTokenizer, UnknownCharactersAndInvalidBytesAreRefusedWithTheirOffset) {
  const auto t = train({"char", nullptr}, "abc");
  const auto error = [&](std::string_view text) { return error_of<UsageError>([&] { t->encode(text); }); };
  EXPECT_NE(error("ab\xC3\xA9").find("character U+00E9 at byte 2"), std::string::npos) << error("ab\xC3\xA9");
  EXPECT_NE(error("abcZ").find("character U+005A at byte 3"), std::string::npos);
  EXPECT_NE(error("a\x80").find("not valid UTF-8 at byte 1"), std::string::npos);
  EXPECT_NE(error_of<UsageError>([] {
              train({"char", nullptr}, "a\xFF");
            }).find("not valid UTF-8 at byte 1"),
            std::string::npos);
  EXPECT_NE(error_of<UsageError>([] { train({"char", nullptr}, ""); }).find("empty"), std::string::npos);
}

TEST(Tokenizer, ByteAndCharFilesLoadBack) {
  const TempFolder folder;
  const std::string text = "hello\n \"\xE4\xB8\xAD\\";
  for (const char* kind : {"byte", "char"}) {
    const auto original = train({kind, nullptr}, text);
    save_tokenizer(*original, folder / "t.json");
    const auto loaded = load_tokenizer(folder / "t.json");
    EXPECT_EQ(loaded->name(), kind);
    EXPECT_EQ(loaded->vocab_size(), original->vocab_size());
    EXPECT_EQ(loaded->encode(text), original->encode(text));
    auto options = std::make_shared<TokenizerFileOptions>();
    options->path = folder / "t.json";
    EXPECT_EQ(train({"file", options}, "")->encode(text), original->encode(text));
  }
}

TEST(Tokenizer, SpecialTokensAreFoundOnlyOnRequest) {
  const auto t = train({"byte", nullptr}, "");
  std::vector<int32_t> ids;
  encode_with_special_tokens(*t, "a<|endoftext|><|endoftext|>b<|end", ids);
  EXPECT_EQ(ids, (std::vector<int32_t>{'a', 256, 256, 'b', '<', '|', 'e', 'n', 'd'}));
  EXPECT_EQ(t->encode("<|endoftext|>").size(), 13U);
}

}  // namespace
}  // namespace shoal
