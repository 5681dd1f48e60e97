// Registry<Base, Args...>: name -> factory, one per kind of component. A component registers itself beside
// its class, with its options struct, so adding one is one .cpp file:
//
//   const bool registered = RouterRegistry::add<TopKOptions>("top_k", "softmax or sigmoid top-k router",
//       [](const TopKOptions& o, const RouterContext& c) { return std::make_unique<TopKRouter>(o, c); });
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/config.h"
#include "core/base/error.h"
#include "core/base/text.h"

namespace shoal {

template <class Base, class... Args>
class Registry final : public ChoiceSet {
 public:
  using Factory = std::function<std::unique_ptr<Base>(const Options&, Args...)>;

  static Registry& instance() {
    static Registry registry;
    return registry;
  }

  /// Call from a namespace-scope initialiser. F: (const O&, Args...) -> std::unique_ptr<Base-derived>.
  template <class O, class F>
  static bool add(const std::string& name, const std::string& doc, F factory) {
    auto [_, fresh] = instance().entries_.emplace(
        name, Entry{doc, [] { return std::make_shared<O>(); },
                    [factory](const Options& options, Args... args) -> std::unique_ptr<Base> {
                      return factory(dynamic_cast<const O&>(options), std::forward<Args>(args)...);
                    }});
    SHOAL_CHECK(fresh, "registry: '", name, "' is registered twice");
    return true;
  }

  /// Makes the chosen component. A choice without options uses the defaults of its kind.
  static std::unique_ptr<Base> make(const Choice& choice, Args... args) {
    const auto& entries = instance().entries_;
    auto it = entries.find(choice.kind);
    if (it == entries.end()) {
      throw UsageError(str("unknown kind '", choice.kind, "'", suggest(choice.kind, instance().names()),
                           "; registered: ", join(instance().names(), " | ")));
    }
    const auto options = choice.options ? choice.options : it->second.make_options();
    return it->second.make(*options, std::forward<Args>(args)...);
  }

  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const auto& [name, _] : entries_) names.push_back(name);
    return names;
  }
  std::string doc(const std::string& name) const override {
    auto it = entries_.find(name);
    return it == entries_.end() ? "" : it->second.doc;
  }
  std::shared_ptr<Options> make_options(const std::string& name) const override {
    auto it = entries_.find(name);
    return it == entries_.end() ? nullptr : it->second.make_options();
  }

 private:
  struct Entry {
    std::string doc;
    std::function<std::shared_ptr<Options>()> make_options;
    Factory make;
  };
  std::map<std::string, Entry> entries_;
};

}  // namespace shoal
