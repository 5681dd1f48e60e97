// The reader of the documentation tests.
#include "tests/docs/markdown.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/tiny_run.h"

namespace shoal::docs {
namespace {

Document read(const std::string& text) {
  const testing::TemporaryFolder folder;
  std::ofstream(folder / "page.md") << text;
  return read_document(folder.path(), "page.md");
}

}  // namespace

TEST(Markdown, BlocksHaveTheirLanguageAndTheCommentInFrontOfThem) {
  const Document page = read(
      "Text.\n\n<!-- not run: why -->\n```sh\na \\\n  b # c\n\n# d\ne 'f # g'\n```\n<!-- lost -->\nText\n"
      "```yaml\nx: 1\n```\n");
  ASSERT_EQ(page.blocks.size(), 2U);
  EXPECT_EQ(page.blocks[0].where(), "page.md:4");
  EXPECT_EQ(page.blocks[0].language, "sh");
  EXPECT_EQ(page.blocks[0].remark("not run"), "why");
  EXPECT_EQ(commands_of(page.blocks[0]), (std::vector<std::string>{"a b # c", "e 'f # g'"}));
  EXPECT_EQ(page.blocks[1].comment, "");
  EXPECT_EQ(page.blocks[1].text(), "x: 1\n");
}

TEST(Markdown, CodeSpansGoOverLineEndsButNotOverParagraphs) {
  const Document page = read("A `b c` and `d\ne`.\n\n```cpp\n`f`\n```\n| `g` | h |\n");
  ASSERT_EQ(page.spans.size(), 3U);
  EXPECT_EQ(page.spans[0].text, "b c");
  EXPECT_EQ(page.spans[1].text, "d e");
  EXPECT_EQ(page.spans[2].where(), "page.md:7");
  EXPECT_THROW(read("A `b\n\nc\n"), Error);
  EXPECT_THROW(read("```sh\na\n"), Error);
}

TEST(Markdown, WordsAreSplitAsTheShellDoes) {
  EXPECT_EQ(split_words("a=\"b c\" d\\ e 'f \"g' # h"), (std::vector<std::string>{"a=b c", "d e", "f \"g"}));
  EXPECT_EQ(split_words("a#b ''"), (std::vector<std::string>{"a#b", ""}));
  EXPECT_TRUE(split_words("  # only a comment").empty());
}

}  // namespace shoal::docs
