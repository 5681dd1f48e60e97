#include "data/prepare.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "core/base/error.h"
#include "core/base/threads.h"
#include "data/indexed_dataset.h"
#include "data/text_source.h"
#include "tests/data/temp_folder.h"

namespace shoal {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::slurp;
using testing::TempFolder;

PrepareOptions options(const TempFolder& folder, const std::string& text, const std::string& kind = "byte") {
  PrepareOptions o;
  o.text = {text};
  o.output = folder / "out";
  o.tokenizer.kind = kind;
  return o;
}

/// The documents of a prepared folder as text.
std::vector<std::string> documents_of(const std::string& folder) {
  const IndexedDataset dataset(indexed_dataset_prefix(folder));
  const auto tokenizer = load_tokenizer(folder);
  std::vector<std::string> documents;
  for (int64_t d = 0; d < dataset.num_documents(); d++) {
    std::vector<int32_t> tokens(
        static_cast<size_t>(dataset.document_begin(d + 1) - dataset.document_begin(d)));
    dataset.read(dataset.document_begin(d), tokens, tokenizer->vocab_size());
    documents.push_back(tokenizer->decode(tokens));
  }
  return documents;
}

TEST(Prepare, CanBeGivenUpBetweenBatchesAndLeavesNothingThatLooksWhole) {
  const TempFolder folder;
  folder.write("in/a.txt", "the quick brown fox jumps over the lazy dog\n");
  const PrepareOptions given = options(folder, folder / "in");
  const auto give_up = [](const PrepareProgress& p) {
    if (p.phase == "encode") throw Error("given up");
  };
  EXPECT_THROW(prepare_dataset(given, give_up), Error);
  for (const auto& entry : fs::directory_iterator(folder / "out")) {
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(name.find(".tmp"), std::string::npos) << name;
    EXPECT_NE(name, "dataset.json");
  }
  EXPECT_EQ(prepare_dataset(given).documents, 1);
}

TEST(Prepare, FolderBecomesOneDocumentPerFileInPathOrder) {
  const TempFolder folder;
  folder.write("in/b.txt", "second");
  folder.write("in/a/z.rst.txt", "first\n");
  folder.write("in/c.md", "third");
  folder.write("in/skipped.bin", "x");
  const auto report = prepare_dataset(options(folder, folder / "in"));
  EXPECT_EQ(documents_of(folder / "out"),
            (std::vector<std::string>{"first\n<|endoftext|>", "second<|endoftext|>", "third<|endoftext|>"}));
  EXPECT_EQ(report.files, 3);
  EXPECT_EQ(report.documents, 3);
  EXPECT_EQ(report.text_bytes, 17);
  EXPECT_EQ(report.tokens, 20);
  EXPECT_EQ(report.vocab_size, 257);
  EXPECT_DOUBLE_EQ(report.bytes_per_token(), 17.0 / 20);
  EXPECT_NE(report.text().find("3 files, 3 documents"), std::string::npos) << report.text();
}

TEST(Prepare, TK_07_EmptyDocumentsAreSkippedAndCounted) {
  const TempFolder folder;
  const auto run = [&](const std::string& name, const std::string& content, const std::string& mode) {
    folder.write(name, content);
    auto o = options(folder, folder / name);
    o.documents = mode;
    return prepare_dataset(o);
  };
  const auto jsonl = run(
      "a.jsonl",
      "\n{\"text\": \"one\"}\n{\"text\": \"\"}\n\n{\"text\": \"two\\n\", \"id\": 3}\r\n{\"text\": \"last\"}",
      "auto");
  EXPECT_EQ(jsonl.documents, 3);
  EXPECT_EQ(jsonl.empty_documents, 3);
  EXPECT_EQ(documents_of(folder / "out"),
            (std::vector<std::string>{"one<|endoftext|>", "two\n<|endoftext|>", "last<|endoftext|>"}));
  const auto blank = run("b.txt", "\n\n a\nb\n \t\r\n\n\nc\n\n", "blank_line");
  EXPECT_EQ(blank.documents, 2);
  EXPECT_EQ(documents_of(folder / "out"),
            (std::vector<std::string>{" a\nb\n<|endoftext|>", "c\n<|endoftext|>"}));
  for (const auto& [name, mode] : std::vector<std::pair<std::string, std::string>>{
           {"e.txt", "file"}, {"f.txt", "blank_line"}, {"g.jsonl", "jsonl"}}) {
    const std::string content = mode == "file" ? "" : "\n\n\n";
    const std::string error = error_of<UsageError>([&] { run(name, content, mode); });
    EXPECT_NE(error.find("the text has no documents"), std::string::npos) << error;
  }
  // The failed runs have not touched the last complete dataset.
  EXPECT_EQ(documents_of(folder / "out").size(), 2U);
  EXPECT_EQ(read_prepared(folder / "out")->documents, 2);
}

TEST(Prepare, JsonlErrorsNameFileAndLine) {
  const TempFolder folder;
  const auto error = [&](const std::string& content) {
    const auto o = options(folder, folder.write("bad.jsonl", content));
    return error_of<UsageError>([&] { prepare_dataset(o); });
  };
  EXPECT_NE(error("{\"text\": \"a\"}\n{\"text\": }\n").find("bad.jsonl:2: expected one JSON object"),
            std::string::npos);
  EXPECT_NE(error("{\"content\": \"a\"}\n")
                .find("bad.jsonl:1: expected a JSON object with a string under \"text\""),
            std::string::npos);
  EXPECT_NE(error("[1]\n").find("bad.jsonl:1:"), std::string::npos);
  EXPECT_NE(error("{\"text\": \"\xFF\"}\n").find("bad.jsonl:1:"), std::string::npos);
  auto o = options(folder, folder.write("key.jsonl", "{\"content\": \"abc\"}"));
  o.text_key = "content";
  EXPECT_EQ(prepare_dataset(o).text_bytes, 3);
}

TEST(Prepare, BpeDatasetIsTheSameForAnyNumberOfThreadsAndDecodesToTheText) {
  const TempFolder folder;
  std::string text;  // longer than one task's share, so that the document is cut
  for (int i = 0; text.size() < 700'000; i++)
    text += str("Line ", i * 7919 % 1000, " of the long text,  don't stop\n\n");
  folder.write("in/long.txt", text);
  folder.write("in/short.txt", "short \xFF\x80 bytes");
  auto tokenizer = std::make_shared<BpeOptions>();
  tokenizer->vocab_size = 400;
  std::vector<std::string> files;
  for (const int threads : {1, 5}) {
    auto o = options(folder, folder / "in", "bpe");
    o.tokenizer.options = tokenizer;
    o.output = folder / str("out", threads);
    const int before = num_threads();
    set_num_threads(threads);
    prepare_dataset(o);
    set_num_threads(before);
    files.push_back(slurp(o.output + "/tokens.bin") + slurp(o.output + "/tokens.idx") +
                    slurp(o.output + "/tokenizer.json"));
    EXPECT_EQ(documents_of(o.output),
              (std::vector<std::string>{text + kEndOfDocumentText,
                                        std::string("short \xFF\x80 bytes") + kEndOfDocumentText}));
  }
  EXPECT_EQ(files[0], files[1]);
  std::vector<int32_t> ids;
  load_tokenizer(folder / "out1")->encode(text, ids);
  const IndexedDataset dataset(folder / "out1/tokens");
  EXPECT_EQ(dataset.document_begin(1), static_cast<int64_t>(ids.size()) + 1);  // cutting changed no ids
}

TEST(Prepare, SecondRunIsSkippedUntilAnInputOrOptionChanges) {
  const TempFolder folder;
  folder.write("in/a.txt", "some text of the file");
  auto o = options(folder, folder / "in", "char");
  const auto first = prepare_dataset(o);
  EXPECT_FALSE(first.up_to_date);
  EXPECT_FALSE(first.replaced);
  const auto again = prepare_dataset(o);
  EXPECT_TRUE(again.up_to_date);
  EXPECT_FALSE(again.replaced);
  EXPECT_EQ(again.tokens, 21);
  EXPECT_NE(again.text().find("already prepared"), std::string::npos);
  folder.write("in/b.txt", "more");
  const auto other = prepare_dataset(o);
  EXPECT_FALSE(other.up_to_date);
  EXPECT_TRUE(other.replaced);
  o.documents = "blank_line";
  EXPECT_FALSE(prepare_dataset(o).up_to_date);
  EXPECT_TRUE(prepare_dataset(o).up_to_date);
  fs::resize_file(folder / "out/tokens.bin", 4);  // damaged: prepared again
  EXPECT_FALSE(prepare_dataset(o).up_to_date);
  EXPECT_EQ(read_prepared(folder / "out")->documents, 2);
  fs::remove(folder / "out/dataset.json");
  EXPECT_FALSE(read_prepared(folder / "out"));
}

TEST(Prepare, ExistingTokenizerIsUsedAndItsChangeNoticed) {
  const TempFolder folder;
  folder.write("in/a.txt", "abcabc");
  prepare_dataset(options(folder, folder / "in", "char"));
  fs::copy_file(folder / "out/tokenizer.json", folder / "mine.json");
  auto file = std::make_shared<TokenizerFileOptions>();
  file->path = folder / "mine.json";
  auto o = options(folder, folder.write("b.txt", "cab"), "file");
  o.tokenizer.options = file;
  EXPECT_EQ(prepare_dataset(o).vocab_size, 3);
  EXPECT_EQ(documents_of(folder / "out"), std::vector<std::string>{"cab"});
  EXPECT_TRUE(prepare_dataset(o).up_to_date);
  folder.write("mine.json", slurp(folder / "mine.json") + "\n");
  EXPECT_FALSE(prepare_dataset(o).up_to_date);
  o.text = {folder.write("c.txt", "abd")};
  EXPECT_NE(error_of<UsageError>([&] { prepare_dataset(o); }).find("character U+0064 at byte 2"),
            std::string::npos);
}

TEST(Prepare, ConcurrentCallsPrepareOnce) {
  const TempFolder folder;
  folder.write("in/a.txt", std::string(100'000, 'x'));
  std::vector<std::thread> threads;
  std::vector<PrepareReport> reports(4);
  for (auto& report : reports) {
    threads.emplace_back([&folder, &report] { report = prepare_dataset(options(folder, folder / "in")); });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(std::count_if(reports.begin(), reports.end(), [](const auto& r) { return !r.up_to_date; }), 1);
  for (const auto& report : reports) EXPECT_EQ(report.tokens, 100'001);
}

TEST(Prepare, ProgressRisesToTheTotal) {
  const TempFolder folder;
  folder.write("in/a.txt", std::string(3 << 20, 'x'));
  folder.write("in/b.txt", "y");
  std::vector<PrepareProgress> calls;
  prepare_dataset(options(folder, folder / "in"), [&](const PrepareProgress& p) { calls.push_back(p); });
  ASSERT_GE(calls.size(), 2U);
  for (size_t i = 1; i < calls.size(); i++) EXPECT_GE(calls[i].done_bytes, calls[i - 1].done_bytes);
  EXPECT_EQ(calls.back().done_bytes, (3 << 20) + 1);
  EXPECT_EQ(calls.back().total_bytes, (3 << 20) + 1);
  EXPECT_EQ(calls.back().phase, "encode");
}

TEST(Prepare, WrongPathsAreUsageErrors) {
  const TempFolder folder;
  const auto error = [](const PrepareOptions& o) {
    return error_of<UsageError>([&] { prepare_dataset(o); });
  };
  EXPECT_NE(error(options(folder, folder / "none")).find("no such file or folder"), std::string::npos);
  folder.write("in/a.bin", "x");
  EXPECT_NE(error(options(folder, folder / "in")).find("no files that end with .txt"), std::string::npos);
  auto o = options(folder, folder.write("a.txt", "x"));
  o.text.clear();
  EXPECT_NE(error(o).find("set text"), std::string::npos);
  o = options(folder, folder / "a.txt");
  o.output = "";
  EXPECT_NE(error(o).find("set output"), std::string::npos);
  o = options(folder, folder / "a.txt", "word");
  EXPECT_NE(error(o).find("registered: bpe | byte | char | file"), std::string::npos) << error(o);
}

TEST(TextSource, ListsEachFileOnceSorted) {
  const TempFolder folder;
  folder.write("in/b.txt", "b");
  folder.write("in/a.txt", "a");
  fs::create_symlink(folder / "in", folder / "in/loop");
  fs::create_symlink(folder / "nowhere", folder / "in/broken.txt");
  const auto files = list_text_files({folder / "in/b.txt", folder / "in"}, {".txt"});
  ASSERT_EQ(files.size(), 2U);
  EXPECT_EQ(files[0].path, folder / "in/a.txt");
  EXPECT_EQ(files[1].size, 1);
}

}  // namespace
}  // namespace shoal
