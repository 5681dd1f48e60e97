#include "launch/layout_page.h"

#include <gtest/gtest.h>

#include <sstream>

#include "core/base/text.h"

namespace shoal {
namespace {

LoadedConfig config_of(const std::string& model, int world, const std::vector<std::string>& overrides) {
  return load_train_config_text(
      "data: {text: t, seq_len: 64, global_batch: 512}\nmodel: {vocab_size: 1000, " + model + "}", "exp.yaml",
      overrides, world);
}

std::string page_of(const std::string& model, int world, const std::vector<std::string>& overrides) {
  const LoadedConfig loaded = config_of(model, world, overrides);
  return layout_page(loaded.config, layout_of(loaded.config, world), 1000);
}

constexpr const char* kMoe =
    "layers: 8, hidden_size: 64, heads: 8, kv_heads: 4, moe: {num_experts: 16, top_k: 2, hidden: 32}";

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// The line that begins with a word, with single blanks.
std::string line_with(const std::string& page, const std::string& start) {
  for (const std::string& line : lines_of(page)) {
    std::istringstream in(line);
    std::string squeezed;
    for (std::string word; in >> word;) squeezed += (squeezed.empty() ? "" : " ") + word;
    if (squeezed.starts_with(start)) return squeezed;
  }
  return "(no line)";
}

TEST(LayoutPage, HasARowForEachOf64Ranks) {
  const std::string page =
      page_of(kMoe, 64, {"parallel.tp=2", "parallel.pp=4", "parallel.ep=4", "parallel.ranks_per_node=8"});
  EXPECT_EQ(line_with(page, "dense"), "dense tp 2 x cp 1 x dp 8 x pp 4, tp fastest");
  EXPECT_EQ(line_with(page, "experts"),
            "experts etp 1 x ep 4 x edp 4 x pp 4, etp fastest; dispatcher all_to_all");
  EXPECT_EQ(line_with(page, "rank node"), "rank node tp dp pp ep edp layers kv heads vocabulary experts");
  EXPECT_EQ(line_with(page, "0 0"), "0 0 0 0 0 0 0 embedding + 0-1 0-1 0-499 0-3");
  EXPECT_EQ(line_with(page, "63 7"), "63 7 1 7 3 3 3 7 + head 2-3 500-999 12-15");
  for (const std::string& line : lines_of(page)) EXPECT_LE(line.size(), 120U) << line;
}

TEST(LayoutPage, LeavesRanksOutOfALongTable) {
  const std::string page = page_of(kMoe, 512, {"parallel.tp=2", "parallel.cp=2", "parallel.ep=16"});
  EXPECT_NE(page.find("ranks 24 to 503 go on in the same way"), std::string::npos);
  EXPECT_EQ(line_with(page, "511"), "511 1 1 127 15 31 embedding + 0-7 + head 2-3 500-999 16-31 + 32-47 15");
  EXPECT_LT(lines_of(page).size(), 75U);
}

/// By hand: a dense model of one layer on two ranks.
TEST(LayoutPage, SaysWhatReplicasSend) {
  const std::string model =
      "layers: 1, hidden_size: 64, heads: 1, norm: {kind: rms_norm}, ffn: {activation: gelu, hidden: 256}";
  // Table, projections, FFN, three norms.
  constexpr int64_t kParams = 1000 * 64 + 4 * 64 * 64 + 2 * 64 * 256 + 3 * 64;
  const std::string bytes = human_bytes(4 * kParams), state = human_bytes(8 * kParams);
  const std::string whole = page_of(model, 2, {});
  EXPECT_EQ(line_with(whole, "weights"), str("weights ", bytes, " ", bytes, " 0"));
  EXPECT_EQ(line_with(whole, "optimizer state"), str("optimizer state ", state, " ", state, " 0"));
  // 2 n (2 - 1) / 2 of the gradients, and two numbers; all ranks hold all parameters.
  const std::string sent = human_bytes(4 * kParams + 16);
  EXPECT_EQ(line_with(whole, "world"), str("world - - ", bytes, " 16 B ", sent, " - ", sent, " 0 ", sent));
  EXPECT_EQ(line_with(whole, "dp - -"), "dp - - - 40 B 40 B - 40 B 0 40 B");
  const std::string cut = page_of(model, 2, {"parallel.zero=1"});
  EXPECT_EQ(line_with(cut, "optimizer state"), str("optimizer state ", bytes, " ", bytes, " 0"));
  EXPECT_NE(page_of(model, 1, {}).find("sent       nothing: there is one rank"), std::string::npos);
}

TEST(LayoutPage, AnIllegalLayoutIsRefusedWithEveryRule) {
  try {
    page_of(kMoe, 64, {"parallel.tp=3", "parallel.ep=5", "parallel.pp=16"});
    FAIL() << "not refused";
  } catch (const UsageError& e) {
    const std::string message = e.what();
    for (const char* part :
         {"expected the world size (64)", "etp (1) x ep (5) x pp (16)", "more than the model's 8"})
      EXPECT_NE(message.find(part), std::string::npos) << part << " is not in\n" << message;
  }
}

}  // namespace
}  // namespace shoal
