#include "core/base/registry.h"

#include <gtest/gtest.h>

#include "tests/core/base/config_example.h"
#include "tests/support/error_of.h"

namespace shoal::test {

using testing::error_of;

TEST(Registry, MakesTheChosenComponentWithItsOptions) {
  auto options = std::make_shared<TopKOptions>();
  options->top_k = 6;
  EXPECT_EQ(GadgetRegistry::make(Choice{"top_k", options}, 64)->name(), "top_k 6 of 64");
}

TEST(Registry, UsesDefaultOptionsForAChoiceWithoutAny) {
  EXPECT_EQ(GadgetRegistry::make(Choice{"top_k", nullptr}, 8)->name(), "top_k 2 of 8");
  EXPECT_EQ(GadgetRegistry::make(Choice{"hash", nullptr}, 8)->name(), "hash 1");
}

TEST(Registry, NamesTheNearestAndAllKindsForAnUnknownOne) {
  EXPECT_EQ(error_of([] {
              GadgetRegistry::make(Choice{"topk", nullptr}, 8);
            }),
            "unknown kind 'topk', did you mean 'top_k'?; registered: hash | top_k");
  EXPECT_THROW(GadgetRegistry::make(Choice{"zebra", nullptr}, 8), UsageError);
}

TEST(Registry, RefusesASecondComponentOfTheSameName) {
  const auto add_again = [] {
    GadgetRegistry::add<HashOptions>("hash", "again",
                                     [](const HashOptions&, int) { return std::unique_ptr<Gadget>(); });
  };
  EXPECT_NE(error_of(add_again).find("registry: 'hash' is registered twice"), std::string::npos);
  EXPECT_EQ(GadgetRegistry::instance().doc("hash"), "experts by token id");
}

TEST(Registry, MakesFreshOptionsEachTime) {
  const auto& registry = GadgetRegistry::instance();
  EXPECT_NE(registry.make_options("hash"), registry.make_options("hash"));
  EXPECT_EQ(registry.make_options("none"), nullptr);
  EXPECT_EQ(registry.doc("none"), "");
}

}  // namespace shoal::test
