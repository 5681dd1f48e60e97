// Text that users really have, folders they may not use, full disks: a clear error, or the right result.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>

#include <fcntl.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "data/batch_loader.h"
#include "data/prepare.h"
#include "tests/data/temp_folder.h"
#include "tests/support/error_of.h"
#include "tests/support/hostile.h"

namespace shoal {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::expect_contains;
using testing::FileSizeLimit;
using testing::message_as_nobody;
using testing::slurp;
using testing::SmallDisk;
using testing::TempFolder;

PrepareOptions options(const TempFolder& folder, const std::string& text, const std::string& kind = "byte",
                       const std::string& documents = "auto") {
  PrepareOptions o;
  o.text = {text};
  o.output = folder / "out";
  o.tokenizer.kind = kind;
  o.documents = documents;
  if (kind == "bpe") {
    auto bpe = std::make_shared<BpeOptions>();
    bpe->vocab_size = 300;
    o.tokenizer.options = bpe;
  }
  return o;
}

std::string all_text_of(const std::string& folder) {
  const IndexedDataset dataset(indexed_dataset_prefix(folder));
  const auto tokenizer = load_tokenizer(folder);
  check_prepared(folder, dataset, *tokenizer);
  std::vector<int32_t> tokens(static_cast<size_t>(dataset.num_tokens()));
  dataset.read(0, tokens, tokenizer->vocab_size());
  return tokenizer->decode(tokens);
}

const std::string kEnd = kEndOfDocumentText;

TEST(BadText, TK_01_AnyBytesComeBackOrAreRefusedWithFileAndPlace) {
  const TempFolder folder;
  std::string every;
  for (int byte = 0; byte < 256; byte++) every += static_cast<char>(byte);
  const std::vector<std::string> texts = {"\x80",
                                          "\xC0\x80",
                                          "\xED\xA0\x80",
                                          "\xE2\x82",
                                          "\xF5\x80\x80\x80",
                                          std::string(1, '\0'),
                                          std::string(70, '\0'),
                                          "\xFF\xFE",
                                          "\xF0\x9F\x98",
                                          every,
                                          "a",
                                          "\n",
                                          "\n\n\n",
                                          "\r\n",
                                          " ",
                                          "\xEF\xBB\xBFtext",
                                          kEnd,
                                          kEnd + kEnd + kEnd};
  for (const std::string& text : texts) {
    folder.write("in.txt", text);
    for (const char* kind : {"byte", "bpe"}) {
      prepare_dataset(options(folder, folder / "in.txt", kind));
      EXPECT_EQ(all_text_of(folder / "out"), text + kEnd) << kind;
    }
  }
  for (const std::string& text : {texts[0], texts[2], "good\n" + texts[3]}) {
    folder.write("in/a.txt", "fine");
    folder.write("in/b.txt", text);
    const std::string error =
        error_of<UsageError>([&] { prepare_dataset(options(folder, folder / "in", "char")); });
    expect_contains(error, "in/b.txt: ");
    expect_contains(error, str("not valid UTF-8 at byte ", text.size() > 3 ? 5 : 0));
  }
}

TEST(BadText, EmptyTinyAndBlankTextsAreSaidToBeTooLittle) {
  const TempFolder folder;
  for (const char* mode : {"file", "blank_line", "jsonl"}) {
    for (const std::string text : {"", "\n", "\n\n \t\r\n"}) {
      if (std::string(mode) == "file" && !text.empty()) continue;  // bytes like others
      folder.write("in.txt", text);
      const auto o = options(folder, folder / "in.txt", "bpe", mode);
      const std::string error = error_of<UsageError>([&] { prepare_dataset(o); });
      expect_contains(error, "the text has no documents: 1 files with ");
      expect_contains(error, "in.txt");
      EXPECT_FALSE(read_prepared(folder / "out"));
    }
  }
  folder.write("in.txt", "x");
  EXPECT_EQ(prepare_dataset(options(folder, folder / "in.txt")).tokens, 2);
  const auto source = std::make_shared<const IndexedDataset>(folder / "out/tokens");
  const auto part = [&](const SplitOptions& split, Split which) {
    return std::make_shared<const TokenDataset>(source, split, which);
  };
  // Two tokens: one sample of length 1, none of length 2.
  const auto loader = [&](int64_t length) {
    return BatchLoader({}, {{part({}, Split::all), 1}}, length, 257);
  };
  EXPECT_EQ(loader(1).samples_per_epoch(), 1);
  expect_contains(error_of<UsageError>([&] { loader(2); }),
                  "one sample needs 3 tokens (sequence length 2 + 1), "
                  "but this part of the data has 2");
  SplitOptions split;
  split.val_documents = 1;
  expect_contains(error_of<UsageError>([&] { part(split, Split::validation); }),
                  "cannot hold out 1 of 1 documents");
  split.val_documents = 1000000;
  expect_contains(error_of<UsageError>([&] { part(split, Split::train); }),
                  "cannot hold out 1000000 of 1 documents");
  split = {};
  split.split = "tail";
  split.val_fraction = 0.01;
  const auto validation = part(split, Split::validation);
  expect_contains(error_of<UsageError>([&] {
                    BatchLoader({}, {{validation, 1}}, 4, 257);
                  }),
                  "another validation share");
}

TEST(BadText, VeryLongLinesAreReadAndTheirErrorsStayShort) {
  const TempFolder folder;
  const std::string line(1 << 20, 'y');
  folder.write("in.jsonl", "{\"text\": \"" + line + "\"}");
  EXPECT_EQ(prepare_dataset(options(folder, folder / "in.jsonl")).tokens, (1 << 20) + 1);
  folder.write("in.jsonl", "{\"text\": \"a\"}\n\"" + line);
  const std::string error =
      error_of<UsageError>([&] { prepare_dataset(options(folder, folder / "in.jsonl")); });
  expect_contains(error, "in.jsonl:2: expected one JSON object per line");
  EXPECT_LT(error.size(), 1000U);
  folder.write("in.jsonl", std::string(1 << 20, '['));
  EXPECT_LT(error_of<UsageError>([&] { prepare_dataset(options(folder, folder / "in.jsonl")); }).size(),
            1000U);
}

TEST(BadText, ThingsThatAreNoFilesAreRefusedOrPassedBy) {
  const TempFolder folder;
  const auto error = [&](const std::string& path) {
    return error_of<UsageError>([&] { prepare_dataset(options(folder, path)); });
  };
  fs::create_directory(folder / "in");
  ASSERT_EQ(::mkfifo((folder / "in/pipe.txt").c_str(), 0600), 0);
  expect_contains(error(folder / "in/pipe.txt"), "pipe.txt: expected a file or a folder, got a device, pipe");
  expect_contains(error("/dev/null"), "text /dev/null: expected a file or a folder");
  expect_contains(error(folder / "in"), "the folder has no files that end with");
  expect_contains(error(folder / "missing.txt"), "missing.txt: no such file or folder");
  fs::create_symlink(folder / "loop.txt", folder / "loop.txt");
  expect_contains(error(folder / "loop.txt"),
                  "loop.txt: expected a file or a folder, got an error: Too many levels");
  fs::create_directory(folder / "in/folder.txt");
  fs::create_symlink("/dev/zero", folder / "in/zero.txt");
  folder.write("in/real.txt", "real");
  prepare_dataset(options(folder, folder / "in"));
  EXPECT_EQ(all_text_of(folder / "out"), "real" + kEnd);
}

TEST(BadText, UnreadableTextAndUnwritableFoldersAreNamed) {
  const TempFolder folder;
  fs::permissions(folder.path(), fs::perms::all);
  folder.write("in/a.txt", "abc");
  folder.write("in/b.txt", "def");
  const auto o = options(folder, folder / "in");
  const auto error = [&](const PrepareOptions& wanted) {
    return message_as_nobody([&] { prepare_dataset(wanted); });
  };
  fs::permissions(folder / "in/b.txt", fs::perms::none);
  expect_contains(error(o), "in/b.txt: cannot be read: Permission denied");
  fs::permissions(folder / "in", fs::perms::none);
  expect_contains(error(o), "in: cannot list the folder: Permission denied");
  expect_contains(error(options(folder, folder / "in/a.txt")),
                  "in/a.txt: expected a file or a folder, got an error: "
                  "Permission denied");
  fs::permissions(folder / "in", fs::perms::all);
  fs::permissions(folder / "in/b.txt", fs::perms::all);
  fs::create_directory(folder / "out");
  fs::permissions(folder / "out", fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read |
                                      fs::perms::others_exec);
  expect_contains(error(o), "out/.lock: cannot create the lock file: Permission denied");
  auto below = o;
  below.output = folder / "out/deeper";
  expect_contains(error(below), "prepare: cannot create the folder");
  below.output = folder / "in/a.txt";
  expect_contains(error(below), "in/a.txt");
  // Prepared by somebody else: no need to write.
  prepare_dataset(o);
  EXPECT_EQ(error(o), "");
  folder.write("in/a.txt", "changed");
  expect_contains(error(o), "Permission denied");
  EXPECT_EQ(all_text_of(folder / "out"), "abc" + kEnd + "def" + kEnd);
  fs::permissions(folder / "out", fs::perms::all);
}

/// The file that an error speaks of, for the four files of a prepared folder.
std::string file_in(const std::string& error) {
  for (const char* name : {"tokens.bin", "tokens.idx", "tokenizer.json", "dataset.json"})
    if (error.find(str(name, ": cannot ")) != std::string::npos) return name;
  return error;
}

/// Whatever a failed preparation left is one of the whole texts, or nothing that can be taken for a dataset.
void expect_whole_or_nothing(const std::string& folder, const std::vector<std::string>& texts) {
  for (const auto& entry : fs::directory_iterator(folder))
    EXPECT_EQ(entry.path().string().find(".tmp."), std::string::npos) << entry.path();
  std::string text;
  const std::string problem = error_of<Error>([&] { text = all_text_of(folder); });
  if (problem.empty()) {
    EXPECT_TRUE(std::find(texts.begin(), texts.end(), text) != texts.end()) << text.substr(0, 200);
  }
}

TEST(BadText, DiskThatIsFullAtAnyFileOfThePreparedFolderIsReportedAndLeavesNothingHalf) {
  const TempFolder folder;
  std::string lines;
  for (int i = 0; i < 1500; i++) lines += str("{\"text\": \"", i % 9, "\"}\n");
  folder.write("in/a.jsonl", lines);
  for (int i = 0; i < 60; i++) folder.write(str("in/", i, std::string(100, 'n'), ".txt"), "z");
  folder.write("old.txt", "old");
  auto o = options(folder, folder / "in", "bpe");
  prepare_dataset(o);
  const std::string wanted = all_text_of(folder / "out");
  fs::remove_all(folder / "out");
  std::set<std::string> hit;
  int failures = 0;
  bool done = false;
  for (int64_t pages = 2; !done && pages < 200; pages += pages < 12 ? 1 : 2) {
    const SmallDisk disk(folder / "disk", pages * 4096);
    if (!disk.mounted()) break;
    o.output = folder / "disk/out";
    for (const bool had_old : {false, true}) {
      auto old = options(folder, folder / "old.txt");
      old.output = o.output;
      if (had_old && !error_of<Error>([&] { prepare_dataset(old); }).empty()) break;
      const std::string error = error_of<Error>([&] { prepare_dataset(o); });
      done = error.empty();
      if (done) break;
      failures++;
      if (fs::exists(o.output)) expect_whole_or_nothing(o.output, {"old" + kEnd, wanted});
      if (error.find("No space left on device") == std::string::npos) ADD_FAILURE() << error;
      if (fs::exists(o.output + "/.lock") && error.find(".lock") == std::string::npos) {
        hit.insert(file_in(error));
        expect_contains(error, "; free ");
      }
      disk.resize(int64_t{8} << 20);
      EXPECT_EQ(error_of<Error>([&] { prepare_dataset(o); }), "") << "after space is back";
      EXPECT_EQ(all_text_of(o.output), wanted);
      fs::remove_all(o.output);
      disk.resize(pages * 4096);
    }
  }
  std::printf("full disk while preparing: %d failures, of %zu files%s\n", failures, hit.size(),
              failures == 0 ? " (this user may not mount; file size limits only)" : "");
  if (failures > 0) {
    EXPECT_EQ(hit, (std::set<std::string>{"tokens.bin", "tokens.idx", "tokenizer.json", "dataset.json"}));
  }
}

TEST(BadText, FileSizeLimitAtAnyFileOfThePreparedFolderActsLikeAFullDisk) {
  const TempFolder folder;
  std::string tiny, many;
  for (int i = 0; i < 400; i++) tiny += "{\"text\": \"x\"}\n";
  folder.write("tiny.jsonl", tiny);                    // large index
  folder.write("long.txt", std::string(20'000, 'x'));  // many tokens
  folder.write("one.txt", "x");                        // the tokenizer is the largest file
  for (int i = 0; i < 60; i++)
    folder.write(str("many/", i, std::string(100, 'n'), ".txt"), "z");  // description
  const std::vector<std::tuple<std::string, std::string, int64_t, std::string>> cases = {
      {"long.txt", "byte", 9000, "tokens.bin"},
      {"tiny.jsonl", "byte", 3000, "tokens.idx"},
      {"one.txt", "bpe", 3000, "tokenizer.json"},
      {"many", "byte", 3000, "dataset.json"}};
  for (const auto& [text, kind, limit, file] : cases) {
    const auto o = options(folder, folder / text, kind);
    prepare_dataset(o);
    const std::string wanted = all_text_of(folder / "out");
    fs::remove_all(folder / "out");
    std::string error;
    {
      const FileSizeLimit small(limit);
      error = error_of<Error>([&] { prepare_dataset(o); });
    }
    EXPECT_EQ(file_in(error), file);
    expect_contains(error, "File too large; needed at least ");
    expect_contains(error, "; free space or choose another output folder");
    expect_whole_or_nothing(folder / "out", {wanted});
    EXPECT_FALSE(prepare_dataset(o).up_to_date);
    EXPECT_TRUE(prepare_dataset(o).up_to_date);
    EXPECT_EQ(all_text_of(folder / "out"), wanted);
    fs::remove_all(folder / "out");
  }
}

/// The modification time of a file, to be set back.
void set_times(const std::string& path, const struct stat& like) {
  const timespec times[2] = {like.st_atim, like.st_mtim};
  ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

TEST(BadText, TextReplacedByOneOfEqualSizeAndTimeIsNoticed) {
  const TempFolder folder;
  // So many files that of the long one only ten blocks of 4 KiB are sampled.
  const std::string path = folder.write("in/0.txt", std::string(100'000, 'a') + "b");
  for (int i = 1; i < 100; i++) folder.write(str("in/", i, ".txt"), "z");
  const auto o = options(folder, folder / "in");
  struct stat before {};
  ASSERT_EQ(::stat(path.c_str(), &before), 0);
  EXPECT_FALSE(prepare_dataset(o).up_to_date);
  EXPECT_TRUE(prepare_dataset(o).up_to_date);

  // In place, at a byte between two sampled blocks.
  std::fstream(path, std::ios::binary | std::ios::in | std::ios::out).seekp(4096 + 500) << 'X';
  set_times(path, before);
  EXPECT_FALSE(prepare_dataset(o).up_to_date);
  EXPECT_EQ(all_text_of(folder / "out").find('X'), 4096U + 500U);

  // By another file under the same name.
  folder.write("new.txt", std::string(100'000, 'c') + "b");
  set_times(folder / "new.txt", before);
  fs::rename(folder / "new.txt", path);
  EXPECT_FALSE(prepare_dataset(o).up_to_date);
  EXPECT_EQ(all_text_of(folder / "out")[0], 'c');

  // Times that changed without the content are no reason to work, and are looked at once only.
  EXPECT_EQ(::utimensat(AT_FDCWD, path.c_str(), nullptr, 0), 0);
  EXPECT_TRUE(prepare_dataset(o).up_to_date);
  const std::string described = slurp(folder / "out/dataset.json");
  EXPECT_TRUE(prepare_dataset(o).up_to_date);
  EXPECT_EQ(slurp(folder / "out/dataset.json"), described);

  // Where even the change time says nothing (some network disks), the sampled blocks do.
  std::fstream(path, std::ios::binary | std::ios::in | std::ios::out).seekp(0) << 'Y';
  struct stat now {};
  ASSERT_EQ(::stat(path.c_str(), &now), 0);
  auto description = nlohmann::json::parse(described);
  const auto nanoseconds = [](const timespec& t) { return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec; };
  description["sources"][0]["mtime_ns"] = nanoseconds(now.st_mtim);
  description["sources"][0]["ctime_ns"] = nanoseconds(now.st_ctim);
  folder.write("out/dataset.json", description.dump());
  EXPECT_FALSE(prepare_dataset(o).up_to_date);
  EXPECT_EQ(all_text_of(folder / "out")[0], 'Y');
}

}  // namespace
}  // namespace shoal
