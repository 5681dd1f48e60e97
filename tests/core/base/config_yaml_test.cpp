#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/base/text.h"
#include "tests/core/base/config_example.h"

namespace shoal::test {

namespace {

// A folder of its own for each test, removed afterwards.
class YamlFiles : public testing::Test {
 protected:
  YamlFiles() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() / str("shoal-yaml-", ::getpid(), "-", info->name());
    std::filesystem::create_directories(folder_);
  }
  ~YamlFiles() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) {
    const auto path = folder_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return path.string();
  }
  // Messages with the folder cut out.
  std::vector<std::string> problems(const std::string& path, Example& example) {
    ConfigErrors errors;
    const ConfigNode node = load_yaml_file(path, errors);
    parse_fields(node, "", example.visitor(), errors);
    std::vector<std::string> out;
    for (auto message : errors.messages()) {
      for (size_t at; (at = message.find(folder_.string() + "/")) != std::string::npos;) {
        message.erase(at, folder_.string().size() + 1);
      }
      out.push_back(message);
    }
    return out;
  }
  std::string problem(const std::string& path) {
    Example example;
    const auto all = problems(path, example);
    EXPECT_EQ(all.size(), 1U) << join(all, "\n");
    return all.empty() ? "" : all.front();
  }
  Example loaded(const std::string& path) {
    Example example;
    EXPECT_EQ(join(problems(path, example), "\n"), "");
    return example;
  }

  std::filesystem::path folder_;
};

std::string repeated(const std::string& text, int times) {
  std::string out;
  for (int i = 0; i < times; i++) out += text;
  return out;
}

}  // namespace

TEST(Yaml, KeepsPositionsAndQuotes) {
  ConfigErrors errors;
  const ConfigNode root =
      load_yaml_text("a: 1\nb:\n  - x\n  - \"y\"\n\xC3\xA9: {c: '5'}\n", "f.yaml", errors);
  EXPECT_TRUE(errors.empty());
  ASSERT_EQ(root.entries.size(), 3U);
  EXPECT_EQ(root.origin.text(), "f.yaml:1:1");
  EXPECT_EQ(root.find("a")->origin.text(), "f.yaml:1:4");
  EXPECT_EQ(root.find("b")->items[1].origin.text(), "f.yaml:4:5");
  EXPECT_TRUE(root.find("b")->items[1].quoted);
  EXPECT_FALSE(root.find("b")->items[0].quoted);
  // Columns count characters, not bytes.
  EXPECT_EQ(root.entries[2].value.entries[0].key_origin.text(), "f.yaml:5:5");
  EXPECT_EQ(root.find("none"), nullptr);
}

TEST(Yaml, FindsTheOriginOfAPathOrOfItsNearestParent) {
  ConfigErrors errors;
  const ConfigNode root = load_yaml_text("a:\n  b: 1\n  c: [1, {d: 2}]\n", "f.yaml", errors);
  EXPECT_EQ(origin_of(root, "a.b").text(), "f.yaml:2:6");
  EXPECT_EQ(origin_of(root, "a.c.1.d").text(), "f.yaml:3:14");
  EXPECT_EQ(origin_of(root, "a.zzz.y").text(), "f.yaml:2:3");
  EXPECT_EQ(origin_of(root, "a.c.9").text(), "f.yaml:3:6");
  EXPECT_EQ(origin_of(root, "q").text(), "f.yaml:1:1");
  EXPECT_EQ(Origin{}.text(), "default");
}

TEST(Yaml, RefusesWhatTheFormatDoesNotNeed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"lr: 1e-3\nlr: 2e-3\n", "config lr (exp.yaml:2:1): duplicate key; first at exp.yaml:1:1"},
      {"model:\n  layers: 1\n  tied: true\n  layers: 2\n",
       "config model.layers (exp.yaml:4:3): duplicate key; first at exp.yaml:2:3"},
      {"sources:\n- path: a\n- {path: a, path: b}\n",
       "config sources.1.path (exp.yaml:3:13): duplicate key; first at exp.yaml:3:4"},
      {"lr: &rate 1e-3\n",
       "config lr (exp.yaml:1:5): anchors (&name) are not supported; write the value out"},
      {"lr: !!float 1\n",
       "config lr (exp.yaml:1:5): tags (!name) are not supported; the key decides the type"},
      {"lr: ! 1e-3\nmodel: 5 6\n", ""},
      {"lr: 1\n---\nlr: 2\n",
       "config (exp.yaml:2:1): expected one YAML document, got a second one ('---'); put it in its own file"},
      {"lr: 1\n]\n", ""},
      {"? [a, b]\n: 1\n",
       "config (exp.yaml:1:3): expected a plain key, got a list or map as a key; is a ] or } missing?"},
      {"{~: 1}", ""},
      {"- a\n- b\n", "config (exp.yaml:1:1): expected 'key: value' lines, got a list of 2"},
      {"lr:1e-3\n",
       "config (exp.yaml:1:1): expected 'key: value' lines, got 'lr:1e-3'; put a space after ':'"},
      {std::string("lr: 1\n# a\0b\n", 12), "config (exp.yaml:2:4): NUL byte; expected UTF-8 text"},
      {"lr: 1 # \x04\n", "config (exp.yaml:1:9): control character 4; expected UTF-8 text"},
      {"model: {name: a\xFF}\n", "config (exp.yaml:1:16): invalid UTF-8; expected UTF-8 text"},
      {"model: {name: \xC0\x80}\n", "config (exp.yaml:1:15): invalid UTF-8; expected UTF-8 text"},
      {"model: {name: \xED\xA0\x80}\n", "config (exp.yaml:1:15): invalid UTF-8; expected UTF-8 text"},
      {"model: {name: \"a\\0b\"}\n", "config model.name (exp.yaml:1:15): NUL byte in a value"},
      {"model: {layers: 1\n", ""},
      {"model:\n  layers: 1\n tied: true\n", ""},
      {"a: b: c\n", ""},
      {"lr: 'abc\n", "config lr (exp.yaml:1:5): not valid YAML: the quote that opens here is never closed"},
      {"lr: \"abc\\\"\n",
       "config lr (exp.yaml:1:5): not valid YAML: the quote that opens here is never closed"},
      {"lr: 1\n\tdropout: 1\n",
       "config (exp.yaml:2:1): not valid YAML: illegal tab when looking for indentation; indent with spaces, "
       "not tabs"},
      {"files: [${env:HOME}]\n",
       "config (exp.yaml:1:10): not valid YAML: end of sequence flow not found; put quotes around ${...} "
       "inside [ ] and "
       "{ }"},
      {"<<: {lr: 1}\n",
       "config << (exp.yaml:1:1): merge keys (<<) are not supported; write the keys out, or put them in a "
       "file "
       "and use extends"},
  };
  for (const auto& [text, problem] : cases) {
    Example example;
    const auto problems = problems_of(text, example);
    ASSERT_FALSE(problems.empty()) << text;
    if (!problem.empty()) {
      EXPECT_EQ(problems.front(), problem);
    }
    EXPECT_NE(problems.front().find("exp.yaml:"), std::string::npos) << problems.front();
  }
}

TEST(Yaml, RefusesAliasesEvenWithoutExpandingThem) {
  Example example;
  const auto problems = problems_of("sizes: &a [1]\nmodel: {moe: {num_experts: *a}}\n", example);
  ASSERT_GE(problems.size(), 2U);
  EXPECT_EQ(problems[0],
            "config sizes (exp.yaml:1:8): anchors (&name) are not supported; write the value out");
  EXPECT_EQ(
      problems[1],
      "config model.moe.num_experts (exp.yaml:2:28): aliases (*name) are not supported; write the value "
      "out");
}

TEST(Yaml, RefusesDeepNestingWithoutUsingTheStack) {
  const std::string opened = repeated("[", 5000);
  std::string indented;
  for (int i = 0; i < 1300; i++) indented += repeated(" ", i) + "a:\n";
  for (const std::string& text :
       {"sizes: " + opened, "sizes: " + opened + repeated("]", 5000), repeated("{a: ", 5000),
        repeated("- ", 5000) + "x", repeated("? ", 5000), indented}) {
    Example example;
    const auto problems = problems_of(text, example);
    ASSERT_FALSE(problems.empty()) << text.substr(0, 40);
    EXPECT_TRUE(names_place(problems[0])) << problems[0];
    const bool said = problems[0].find("nested deeper than 64 levels") != std::string::npos ||
                      problems[0].find("expected a plain key") != std::string::npos;
    EXPECT_TRUE(said) << problems[0];
  }
  ConfigErrors errors;
  load_yaml_text("a: " + repeated("[", 63) + repeated("]", 63), "exp.yaml", errors);
  EXPECT_TRUE(errors.empty());
  load_yaml_text("a: " + repeated("[", 64) + repeated("]", 64), "exp.yaml", errors);
  ASSERT_EQ(errors.messages().size(), 1U);
  EXPECT_EQ(errors.messages()[0], "config (exp.yaml:1:67): nested deeper than 64 levels");
}

TEST(Yaml, RefusesMoreThanOneMebibyte) {
  std::string text = "lr: 1e-3\n";
  text += "#" + std::string((size_t{1} << 20) - text.size() - 1, 'x');
  Example example;
  EXPECT_EQ(problems_of(text, example).size(), 0U);
  EXPECT_NE(problem_of(text + "y").find("larger than 1 MiB"), std::string::npos);
}

TEST(Yaml, SkipsAByteOrderMarkAndReadsWindowsLineEnds) {
  EXPECT_EQ(parsed("\xEF\xBB\xBFlr: 2e-3\r\nmodel:\r\n  layers: 9\r\n").model.layers, 9);
  EXPECT_EQ(problem_of("\xEF\xBB\xBFlr: x\r\n"),
            "config lr (exp.yaml:1:5): expected a number (> 0), got 'x'");
}

TEST(YamlEnvironment, ExpandsVariablesInPlainAndQuotedScalars) {
  ::setenv("SHOAL_TEST_NUMBER", "12", 1);
  ::setenv("SHOAL_TEST_EMPTY", "", 1);
  ::unsetenv("SHOAL_TEST_UNSET");
  EXPECT_EQ(parsed("model: {layers: 3, name: \"n${env:SHOAL_TEST_NUMBER}\"}").model.name, "n12");
  EXPECT_EQ(parsed("model:\n  layers: ${env:SHOAL_TEST_NUMBER}\n").model.layers, 12);
  EXPECT_EQ(parsed("model:\n  layers: ${env:SHOAL_TEST_UNSET:-7}\n").model.layers, 7);
  EXPECT_EQ(parsed("model:\n  layers: ${env:SHOAL_TEST_EMPTY:-8}\n").model.layers, 8);
  EXPECT_EQ(parsed("model:\n  name: ${env:SHOAL_TEST_EMPTY}\n").model.name, "");
  EXPECT_EQ(parsed("model:\n  name: ${env:SHOAL_TEST_UNSET:-}x\n").model.name, "x");
  EXPECT_EQ(parsed("model:\n  name: a$$b$ $${env:X}\n").model.name, "a$b$ ${env:X}");
  EXPECT_EQ(parsed("files: ['${env:SHOAL_TEST_NUMBER}/${env:SHOAL_TEST_NUMBER}']").files[0], "12/12");
}

TEST(YamlEnvironment, NamesTheUnsetVariableAndItsPlace) {
  ::unsetenv("SHOAL_TEST_UNSET");
  EXPECT_EQ(
      problem_of("model:\n  name: ${env:SHOAL_TEST_UNSET}\n"),
      "config model.name (exp.yaml:2:9): environment variable SHOAL_TEST_UNSET is not set; set it or write "
      "${env:SHOAL_TEST_UNSET:-default}");
  EXPECT_EQ(problem_of("model:\n  name: ${HOME}\n"),
            "config model.name (exp.yaml:2:9): expected ${env:NAME} or ${env:NAME:-default}, got '${HOME}'; "
            "write $${ "
            "for a literal ${");
  EXPECT_EQ(problem_of("model:\n  name: ${env:A\n"),
            "config model.name (exp.yaml:2:9): '${' without '}'; write $${ for a literal ${");
  EXPECT_EQ(problem_of("model:\n  name: ${env:}\n"),
            "config model.name (exp.yaml:2:9): ${env:} names no environment variable");
  ::setenv("SHOAL_TEST_BYTES", "a\xFF", 1);
  EXPECT_EQ(problem_of("model:\n  name: ${env:SHOAL_TEST_BYTES}\n"),
            "config model.name (exp.yaml:2:9): invalid UTF-8 in environment variable SHOAL_TEST_BYTES");
}

TEST_F(YamlFiles, MergesMapsAndReplacesListsAndScalars) {
  write("base/model.yaml", "model:\n  layers: 2\n  tied: false\nsizes: [1, 2, 3]\nlr: 1\n");
  const auto path = write("exp.yaml", "extends: base/model.yaml\nmodel:\n  layers: 6\nsizes: [9]\n");
  const Example example = loaded(path);
  EXPECT_EQ(example.model.layers, 6);
  EXPECT_FALSE(example.model.tied);
  EXPECT_EQ(example.sizes, (std::vector<int64_t>{9}));
  EXPECT_EQ(example.lr, 1);
  ConfigErrors errors;
  const ConfigNode root = load_yaml_file(path, errors);
  EXPECT_EQ(origin_of(root, "model.layers").text(), path + ":3:11");
  EXPECT_EQ(origin_of(root, "model.tied").text(), (folder_ / "base/model.yaml").string() + ":3:9");
}

TEST_F(YamlFiles, ExtendsFilesInOrderAndRelativeToEachFile) {
  write("a/one.yaml", "extends: ../b/two.yaml\nlr: 1\nmodel: {layers: 10}\n");
  write("b/two.yaml", "extends: three.yaml\nlr: 2\ndropout: 0.25\n");
  write("b/three.yaml", "betas: [0.5]\n");
  write("last.yaml", "model: {layers: 11}\n");
  const Example example = loaded(write("exp.yaml", "extends: [a/one.yaml, last.yaml]\n"));
  EXPECT_EQ(example.lr, 1);
  EXPECT_EQ(example.dropout, 0.25);
  EXPECT_EQ(example.betas, (std::vector<double>{0.5}));
  EXPECT_EQ(example.model.layers, 11);
}

TEST_F(YamlFiles, AnEmptySectionOfTheChildKeepsTheParents) {
  write("base.yaml", "model: {layers: 2}\n");
  EXPECT_EQ(loaded(write("exp.yaml", "extends: base.yaml\nmodel:\n")).model.layers, 2);
  EXPECT_EQ(loaded(write("only.yaml", "extends: base.yaml\n")).model.layers, 2);
}

TEST_F(YamlFiles, AnotherKindDropsTheOptionsOfTheParent) {
  const auto scale_of = [](const Example& e) {
    return dynamic_cast<HashOptions&>(*e.model.moe.router.options).scale;
  };
  const auto router = [](const std::string& value) { return "model:\n  moe:\n    router: " + value + "\n"; };
  const auto child = [&](const std::string& value) {
    return loaded(write("exp.yaml", "extends: base.yaml\n" + router(value)));
  };
  write("base.yaml", router("{kind: top_k, scale: 7, score: sigmoid}"));
  EXPECT_EQ(scale_of(child("{kind: hash}")), 3.0);
  EXPECT_EQ(scale_of(child("hash")), 3.0);
  EXPECT_EQ(scale_of(child("{kind: hash, scale: 4}")), 4.0);
  // The same kind keeps them, in the short form too.
  for (const char* same : {"{kind: top_k, top_k: 5}", "{top_k: 5}", "top_k", "{}"}) {
    const Example example = child(same);
    EXPECT_EQ(dynamic_cast<TopKOptions&>(*example.model.moe.router.options).score, "sigmoid") << same;
  }
  write("base.yaml", router("hash"));
  EXPECT_EQ(scale_of(child("{scale: 4}")), 4.0);
  EXPECT_EQ(child("{top_k: 4, kind: top_k}").model.moe.router.kind, "top_k");
  // Options written for the default kind stay with it.
  write("base.yaml", router("{scale: 7, score: sigmoid}"));
  EXPECT_EQ(scale_of(child("hash")), 3.0);
  EXPECT_EQ(scale_of(child("{kind: hash, scale: 5}")), 5.0);
  EXPECT_EQ(dynamic_cast<TopKOptions&>(*child("top_k").model.moe.router.options).scale, 7.0);
}

TEST_F(YamlFiles, ASectionReplacedByAScalarIsRefusedAsOne) {
  write("base.yaml", "model: {layers: 2}\n");
  EXPECT_EQ(problem(write("exp.yaml", "extends: base.yaml\nmodel: big\n")),
            "config model (exp.yaml:2:8): expected a section (a map), got 'big'");
}

TEST_F(YamlFiles, RefusesCircles) {
  write("a.yaml", "extends: b.yaml\n");
  write("b.yaml", "extends: ./c.yaml\n");
  const auto path = write("c.yaml", "lr: 1\nextends: a.yaml\n");
  EXPECT_EQ(
      problem(path),
      "config extends (b.yaml:1:10): extends goes round in a circle: c.yaml -> a.yaml -> b.yaml -> c.yaml");
  EXPECT_EQ(problem(write("self.yaml", "extends: self.yaml\n")),
            "config extends (self.yaml:1:10): extends goes round in a circle: self.yaml -> self.yaml");
}

TEST_F(YamlFiles, LimitsHowManyFilesAreRead) {
  for (int i = 0; i < 12; i++) {
    write(str("f", i, ".yaml"), str("extends: [f", i + 1, ".yaml, f", i + 1, ".yaml]\n"));
  }
  write("f12.yaml", "lr: 1\n");
  Example example;
  const auto all = problems((folder_ / "f0.yaml").string(), example);
  ASSERT_FALSE(all.empty());
  EXPECT_NE(all[0].find("more than 64 files in a chain of extends"), std::string::npos) << all[0];
}

TEST_F(YamlFiles, NamesMissingFilesAndFolders) {
  EXPECT_EQ(problem((folder_ / "none.yaml").string()), "config (none.yaml): no such file");
  std::filesystem::create_directories(folder_ / "sub");
  EXPECT_EQ(problem((folder_ / "sub").string()), str("config (sub): expected a YAML file, got a directory"));
  EXPECT_EQ(problem(write("exp.yaml", "lr: 1\nextends: gone.yaml\n")),
            "config extends (exp.yaml:2:10): file 'gone.yaml': no such file");
  EXPECT_EQ(problem(write("list.yaml", "extends: [[a]]\n")),
            "config extends (list.yaml:1:11): expected a file name or a list of them, got a list of 1");
  EXPECT_EQ(problem(write("empty.yaml", "extends:\n")).substr(0, 70),
            "config extends (empty.yaml:2:1): expected a file name or a list of the");
}

TEST_F(YamlFiles, RefusesAFileThatCannotBeRead) {
  if (::geteuid() == 0) GTEST_SKIP() << "root reads every file";
  const auto path = write("secret.yaml", "lr: 1\n");
  std::filesystem::permissions(path, std::filesystem::perms::none);
  EXPECT_EQ(problem(path), "config (secret.yaml): cannot be read; check its permissions");
}

TEST_F(YamlFiles, ProblemsOfTheParentCarryItsOwnPosition) {
  write("base.yaml", "model:\n  layrs: 2\n");
  EXPECT_EQ(problem(write("exp.yaml", "extends: base.yaml\nmodel: {tied: true}\n")),
            "config model.layrs (base.yaml:2:3): unknown key, did you mean 'layers'?");
}

}  // namespace shoal::test
