#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "data/bpe_trainer.h"

namespace shoal {
namespace {

// Ids computed once by Hugging Face's tokenizers library (version 0.23.3), trained on the same text with the
// same settings: byte-level, vocabulary 340, <|endoftext|> first. The end sign in a text was encoded as
// ordinary text.
const std::string kTrainingText =
    "The cat doesn't sit on the 12345 mats; it's 2024 and we've 100 cats.\n\n    def cat(self):\n        "
    "return self.mats  # don't\r\n\r\n\tWE'LL see: \"the cats\" ------ ======\nCaf\xC3\xA9 na\xC3\xAFve "
    "\xC2\xBD \xE4\xB8\xAD\xE6\x96\x87\xE5\xAD\x97 \xE4\xB8\xAD\xE6\x96\x87 \xD9\xA1\xD9\xA2\xD9\xA3 the "
    "end.   \n";

struct Reference {
  std::string text;
  std::vector<int32_t> gpt2, llama3;
};

const std::vector<Reference>& references() {
  static const std::vector<Reference> table = {
      {"ied 4 \xC2\xBD months",
       {73, 69, 68, 221, 20, 337, 221, 77, 273, 84, 72, 83},
       {73, 69, 68, 221, 20, 221, 321, 221, 77, 273, 84, 72, 83}},
      {"12345", {17, 294, 296}, {297, 19, 300}},
      {"  a", {221, 221, 65}, {221, 221, 65}},
      {"a \n\n b", {65, 221, 321, 221, 66}, {65, 221, 199, 199, 221, 66}},
      {"don't DON'T don\xE2\x80\x99t",
       {68, 273, 268, 221, 36, 47, 46, 7, 52, 266, 273, 159, 223, 248, 84},
       {68, 273, 268, 221, 36, 47, 46, 7, 52, 266, 273, 159, 223, 248, 84}},
      {"\t\ttabs\t x", {198, 198, 84, 65, 66, 83, 198, 221, 88}, {198, 198, 84, 65, 66, 83, 198, 221, 88}},
      {"line\r\nline\r\n\r\n",
       {76, 73, 78, 69, 202, 199, 76, 73, 78, 69, 278, 278},
       {76, 73, 78, 69, 278, 76, 73, 78, 69, 278, 278}},
      {"no\xC2\xA0"
       "break\xC2\xA0 space",
       {78, 79, 127, 255, 66, 82, 69, 65, 75, 127, 255, 221, 83, 80, 65, 67, 69},
       {78, 79, 127, 255, 66, 82, 69, 65, 75, 127, 255, 221, 83, 80, 65, 67, 69}},
      {"\xD9\xA1\xD9\xA2\xD9\xA3\xD9\xA4 \xE0\xA5\xA7",
       {319, 316, 97, 150, 98, 221, 157, 99, 101},
       {322, 319, 97, 150, 98, 221, 157, 99, 101}},
      {"e\xCC\x81"
       "a\xCC\x88 cafe\xCC\x81",
       {69, 137, 224, 65, 137, 231, 221, 67, 65, 70, 69, 137, 224},
       {69, 137, 224, 65, 137, 231, 221, 67, 65, 70, 69, 137, 224}},
      {"\xE4\xB8\xAD\xE6\x96\x87\xE5\xAD\x97\xE7\xAC\xA6 \xE6\x97\xA5\xE6\x9C\xAC\xE8\xAA\x9E",
       {276, 287, 320, 246, 164, 106, 100, 221, 163, 246, 99, 163, 251, 106, 165, 104, 253},
       {276, 286, 323, 246, 164, 106, 100, 221, 163, 246, 99, 163, 251, 106, 165, 104, 253}},
      {"\xF0\x9F\x91\xA8\xE2\x80\x8D\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA7 ok",
       {173, 254, 240, 102, 159, 223, 236, 173, 254, 240, 103,
        159, 223, 236, 173, 254, 240, 101, 221, 79,  75},
       {173, 254, 240, 102, 159, 223, 236, 173, 254, 240, 103,
        159, 223, 236, 173, 254, 240, 101, 221, 79,  75}},
      {"'\xC5\xBF 'S 'Re x'LL",
       {7, 130, 124, 221, 7, 51, 221, 7, 50, 69, 221, 88, 7, 298},
       {7, 130, 124, 221, 7, 51, 221, 7, 50, 69, 221, 88, 288, 44}},
      {"a\xC2\x85"
       "b\xE1\xA0\x8E"
       "c \xE2\x80\xA8 d",
       {65, 127, 228, 66, 158, 255, 237, 67, 221, 159, 223, 102, 266},
       {65, 127, 228, 66, 158, 255, 237, 67, 221, 159, 223, 102, 266}},
      {"--- ===\n\n  ;;\n",
       {259, 13, 221, 260, 29, 321, 221, 221, 27, 27, 199},
       {259, 13, 221, 260, 29, 199, 199, 221, 221, 27, 27, 199}},
      {"<|endoftext|>",
       {28, 92, 306, 79, 70, 84, 69, 88, 84, 92, 30},
       {28, 92, 309, 79, 70, 84, 69, 88, 84, 92, 30}},
      {" ", {221}, {221}},
      {"\n", {199}, {199}},
      {"the cats'll", {265, 285, 7, 76, 76}, {265, 284, 7, 76, 76}},
      {std::string("\x00"
                   "a\x01 \x7F",
                   5),
       {189, 65, 190, 221, 222},
       {189, 65, 190, 221, 222}},
  };
  return table;
}

std::unique_ptr<Tokenizer> train(const std::string& regex) {
  BpeOptions options;
  options.vocab_size = 340;
  options.regex = regex;
  BpeTrainer trainer(options);
  const std::string_view text = kTrainingText;
  trainer.add({&text, 1});
  return trainer.train().tokenizer;
}

TEST(Bpe, TK_03_IdsEqualTheReferenceTokenizer) {
  const auto gpt2 = train("gpt2"), llama3 = train("llama3");
  for (const auto& reference : references()) {
    EXPECT_EQ(gpt2->encode(reference.text), reference.gpt2) << "gpt2: " << reference.text;
    EXPECT_EQ(llama3->encode(reference.text), reference.llama3) << "llama3: " << reference.text;
    EXPECT_EQ(gpt2->decode(reference.gpt2), reference.text);
    EXPECT_EQ(llama3->decode(reference.llama3), reference.text);
  }
}

TEST(Bpe, TK_03_TenThousandSpacesEqualTheReferenceTokenizer) {
  const std::string spaces(10000, ' ');
  const auto gpt2 = train("gpt2"), llama3 = train("llama3");
  EXPECT_EQ(gpt2->encode(spaces), std::vector<int32_t>(5000, 257));
  EXPECT_EQ(llama3->encode(spaces), std::vector<int32_t>(2500, 338));
  std::vector<int32_t> expected(4997, 257);
  expected.insert(expected.end(), {339, 221, 65});
  EXPECT_EQ(gpt2->encode(spaces + "a"), expected);
  expected.assign(2499, 338);
  expected.insert(expected.end(), {267, 221, 65});
  EXPECT_EQ(llama3->encode(spaces + "a"), expected);
}

}  // namespace
}  // namespace shoal
