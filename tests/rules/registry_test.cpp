// Registered components: each is really in the binary, and the user can read about it.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/base/config.h"
#include "core/base/error.h"
#include "data/tokenizer.h"
#include "models/ffn.h"
#include "models/model.h"
#include "models/moe/router.h"
#include "models/position.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "parallel/moe/dispatcher.h"
#include "tests/rules/source_tree.h"

namespace shoal::rules {

namespace {

// Every registry of the program, by the name that sources use for it. A registry that is missing here fails
// EveryRegistrationIsInTheBinary with its name.
std::map<std::string, const ChoiceSet*> all_registries() {
  return {
      {"DispatcherRegistry", &DispatcherRegistry::instance()},
      {"FfnActivationRegistry", &FfnActivationRegistry::instance()},
      {"ModelRegistry", &ModelRegistry::instance()},
      {"PositionRegistry", &PositionRegistry::instance()},
      {"RouterRegistry", &RouterRegistry::instance()},
      {"OptimizerRegistry", &OptimizerRegistry::instance()},
      {"ScheduleRegistry", &ScheduleRegistry::instance()},
      {"TokenizerTrainerRegistry", &TokenizerTrainerRegistry::instance()},
  };
}

struct Found {
  const SourceFile* file;
  Registration registration;
};
std::vector<Found> all_registrations() {
  std::vector<Found> found;
  for (const auto& file : all_sources())
    if (file.is_cpp() && !file.path.starts_with("tests/"))
      for (const auto& registration : registrations_of(file)) found.push_back({&file, registration});
  return found;
}

bool mentions(const SourceFile& file, const std::string& word) {
  for (const auto& line : file.lines) {
    for (size_t at = line.find(word); at != std::string::npos; at = line.find(word, at + 1)) {
      auto is_word = [&](size_t i) {
        return i < line.size() && (std::isalnum(static_cast<unsigned char>(line[i])) || line[i] == '_');
      };
      if (!is_word(at + word.size()) && (at == 0 || !is_word(at - 1))) return true;
    }
  }
  return false;
}

}  // namespace

// Static initialisers are dropped silently when objects go through an archive.
TEST(RegistryRules, EveryRegistrationIsInTheBinary) {
  const auto registries = all_registries();
  std::vector<std::string> missing;
  for (const auto& [file, registration] : all_registrations()) {
    const auto it = registries.find(registration.registry);
    if (it == registries.end()) {
      missing.push_back(
          violation(*file, registration.line, str(registration.registry, " is not listed in this test")));
      continue;
    }
    const auto names = it->second->names();
    if (std::find(names.begin(), names.end(), registration.name) == names.end())
      missing.push_back(violation(*file, registration.line,
                                  str("'", registration.name, "' is not registered at run time")));
  }
  EXPECT_TRUE(missing.empty()) << listing(missing);
}

// The rules below read the sources, so a registration in a form they do not understand would escape them.
TEST(RegistryRules, EveryKindInTheBinaryIsSeenInTheSources) {
  const auto registrations = all_registrations();
  for (const auto& [registry, choices] : all_registries()) {
    for (const auto& name : choices->names()) {
      const bool seen = std::any_of(registrations.begin(), registrations.end(), [&](const Found& found) {
        return found.registration.registry == registry && found.registration.name == name;
      });
      EXPECT_TRUE(seen) << registry << ": no source registers '" << name << "' as add<...>(\"" << name
                        << "\", ...)";
    }
  }
}

TEST(RegistryRules, EveryKindIsDocumentedAndHasOptions) {
  for (const auto& [registry, choices] : all_registries()) {
    for (const auto& name : choices->names()) {
      EXPECT_NE(choices->doc(name), "") << registry << ": '" << name << "' has no documentation";
      EXPECT_NE(choices->make_options(name), nullptr) << registry << ": " << name;
    }
  }
}

TEST(RegistryRules, ReadmeMentionsEveryKind) {
  const auto& files = all_sources();
  const auto readme =
      std::find_if(files.begin(), files.end(), [](const auto& f) { return f.path == "README.md"; });
  ASSERT_NE(readme, files.end()) << "README.md is missing";
  std::vector<std::string> missing;
  for (const auto& [file, registration] : all_registrations())
    if (!mentions(*readme, registration.name))
      missing.push_back(
          violation(*file, registration.line, str("README.md does not mention '", registration.name, "'")));
  EXPECT_TRUE(missing.empty()) << listing(missing);
}

TEST(RegistryRules, EveryRegistrationHasATest) {
  std::vector<std::string> missing;
  for (const auto& [file, registration] : all_registrations()) {
    const bool tested = std::any_of(all_sources().begin(), all_sources().end(), [&](const auto& source) {
      return source.path.starts_with("tests/") && source.is_cpp() && mentions(source, registration.name);
    });
    if (!tested)
      missing.push_back(
          violation(*file, registration.line, str("no test mentions '", registration.name, "'")));
  }
  EXPECT_TRUE(missing.empty()) << listing(missing);
}

}  // namespace shoal::rules
