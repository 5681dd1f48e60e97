#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/core/base/config_example.h"

namespace shoal::test {

namespace {

using Json = nlohmann::json;

std::string explained(const std::string& path) {
  Example example;
  return explain_field(example.visitor(), path);
}

std::string explain_error(const std::string& path) {
  try {
    return "no error: " + explained(path);
  } catch (const UsageError& e) {
    return e.what();
  }
}

}  // namespace

TEST(Schema, IsJsonWithTypesRangesDefaultsAndDescriptions) {
  Example example;
  const Json schema = Json::parse(schema_of(example.visitor()));
  EXPECT_EQ(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
  EXPECT_EQ(schema["type"], "object");
  EXPECT_EQ(schema["additionalProperties"], false);
  const Json& properties = schema["properties"];
  EXPECT_EQ(
      properties["lr"],
      Json::parse(
          R"({"type":"number","exclusiveMinimum":0,"default":1e-4,"description":"peak learning rate"})"));
  EXPECT_EQ(properties["sizes"],
            Json::parse(R"({"anyOf":[{"type":"array","items":{"type":"integer","minimum":0}},
            {"type":"integer","minimum":0}],"default":[1,2],"description":"some sizes"})"));
  EXPECT_EQ(properties["files"]["default"], Json::array());
  const Json& model = properties["model"];
  EXPECT_EQ(model["additionalProperties"], false);
  EXPECT_EQ(model["properties"]["hidden"],
            Json::parse(R"({"anyOf":[{"type":"integer","minimum":1},{"const":"auto"}],"default":"auto",
            "description":"width of the FFN"})"));
  EXPECT_EQ(model["properties"]["tied"]["default"], true);
  EXPECT_EQ(model["properties"]["name"]["default"], "base");
  EXPECT_EQ(properties["sources"]["items"]["properties"]["weight"]["minimum"], 0);
  EXPECT_TRUE(properties.contains("extends"));
}

TEST(Schema, HasOneFormPerKindOfAChoice) {
  Example example;
  const Json schema = Json::parse(schema_of(example.visitor()));
  const Json& router = schema["properties"]["model"]["properties"]["moe"]["properties"]["router"];
  EXPECT_EQ(router["default"], "top_k");
  ASSERT_EQ(router["oneOf"].size(), 3U);
  EXPECT_EQ(router["oneOf"][0]["enum"], Json::array({"hash", "top_k"}));
  const Json &hash = router["oneOf"][1], &top_k = router["oneOf"][2];
  EXPECT_EQ(hash["properties"]["kind"]["const"], "hash");
  EXPECT_EQ(hash["required"], Json::array({"kind"}));
  EXPECT_EQ(hash["additionalProperties"], false);
  EXPECT_EQ(top_k["properties"]["kind"]["const"], "top_k");
  EXPECT_FALSE(top_k.contains("required"));
  EXPECT_EQ(top_k["properties"]["score"]["enum"], Json::array({"softmax", "sigmoid"}));
  EXPECT_EQ(top_k["properties"]["top_k"]["minimum"], 1);
}

TEST(Schema, LeavesTheStructAsItWas) {
  Example example;
  example.sources.resize(2);
  example.sources[1].path = "b";
  schema_of(example.visitor());
  ASSERT_EQ(example.sources.size(), 2U);
  EXPECT_EQ(example.sources[1].path, "b");
}

TEST(Explain, SaysTypeDefaultAllowedAndDocumentation) {
  EXPECT_EQ(explained("lr"), "lr: number, default 1e-4\n  peak learning rate\n  allowed: > 0\n");
  EXPECT_EQ(explained("model.hidden"),
            "model.hidden: integer or auto, default auto\n  width of the FFN\n  allowed: >= 1\n");
  EXPECT_EQ(explained("betas"),
            "betas: list of number, default [0.9, 0.95]\n  moment decay rates\n  allowed: each 0..1\n");
  EXPECT_EQ(explained("sources.weight").substr(0, 33), "sources.weight: number, default 1");
  EXPECT_EQ(explained("sources.0.weight"),
            "sources.0.weight: number, default 1\n  share of the samples\n  allowed: >= 0\n");
}

TEST(Explain, ListsTheKeysOfASection) {
  EXPECT_EQ(explained("model.moe"),
            "model.moe: section\n  mixture of experts\n  keys:\n"
            "    model.moe.router       choice, default top_k        sends tokens to experts\n"
            "    model.moe.num_experts  integer, 1..4096, default 8  number of routed experts\n");
  EXPECT_NE(explained("").find("sources  list of sections"), std::string::npos) << explained("");
  EXPECT_NE(explained("sources").find("sources.N.path"), std::string::npos);
}

TEST(Explain, ListsAllKindsWithTheirOptions) {
  const std::string text = explained("model.moe.router");
  EXPECT_EQ(text, explained("model.moe.router.kind"));
  for (const char* part :
       {"model.moe.router: choice, default top_k\n",
        "    top_k  best k experts\n    hash   experts by token id\n",
        "  options of top_k (the default kind):\n    model.moe.router.top_k  integer, >= 1, default 2",
        "  options of hash:\n    model.moe.router.seed "}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST(Explain, ShowsAnOptionForEveryKindThatHasIt) {
  EXPECT_EQ(explained("model.moe.router.scale"),
            "model.moe.router.scale: number, default 1\n  factor on the weights\n  allowed: > 0\n"
            "  when model.moe.router.kind is top_k\n"
            "model.moe.router.scale: number, default 3\n  factor on the weights\n"
            "  when model.moe.router.kind is hash\n");
}

TEST(Explain, NamesTheNearestKeyForAnUnknownOne) {
  EXPECT_EQ(explain_error("model.layer"), "config key model.layer: unknown key, did you mean 'layers'?");
  EXPECT_EQ(explain_error("layers"), "config key layers: unknown key; 'layers' belongs to model");
  EXPECT_EQ(explain_error("model.moe.router.scor"),
            "config key model.moe.router.scor: unknown key, did you mean 'score'?");
  EXPECT_EQ(explain_error("lr.x"), "config key lr.x: lr has no keys below it");
  EXPECT_EQ(explain_error("model..layers").substr(0, 31), "config key model.: unknown key;");
}

}  // namespace shoal::test
