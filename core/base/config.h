// Typed configuration: every component has a plain struct with one fields() list. The same list drives
// parsing, overrides, printing, the JSON Schema and --explain, so a key cannot exist without its
// documentation. ConfigNode is the parsed YAML with origins; FieldVisitor walks a struct. Used by all
// folders; YAML itself is read only in core/base/yaml.cpp.
//
//   struct RouterOptions : Options {
//     int64_t top_k = 2;
//     void fields(FieldVisitor& v) override { v("top_k", top_k, "experts per token", at_least(1)); }
//   };
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace shoal {

/// Where a value came from: a place in a file, a command-line override, or the built-in default.
struct Origin {
  std::string source = "default";  // file name, "command line" or "default"
  int line = 0, column = 0;        // 1-based; 0: no position
  std::string text() const;        // "exp.yaml:14:12", "command line" or "default"
};

/// One node of a parsed config: a scalar (kept as text), a list, a map with ordered keys, or null.
class ConfigNode {
 public:
  enum class Kind { null, scalar, list, map };
  struct Entry;

  Kind kind = Kind::null;
  std::string scalar;             // Kind::scalar: the text without quotes
  bool quoted = false;            // Kind::scalar: was in quotes, so it is a string whatever it looks like
  bool refused = false;           // its problem is reported already: it counts as absent
  std::vector<ConfigNode> items;  // Kind::list
  std::vector<Entry> entries;     // Kind::map, in file order, keys unique
  Origin origin;                  // of the value

  const ConfigNode* find(std::string_view key) const;
  ConfigNode* find(std::string_view key);
};

struct ConfigNode::Entry {
  std::string key;
  Origin key_origin;
  ConfigNode value;
  bool shorthand = false;  // `kind`, written as `router: top_k`
  // Came from an extended file that leaves `kind` to the default, under a map that sets it: it holds only
  // when that kind is the default one.
  bool for_default_kind = false;
};

/// Which values a field accepts; checked when a config is parsed, printed in the schema and by --explain.
struct Constraint {
  std::optional<double> min, max;
  bool exclusive_min = false;        // value > min instead of value >= min
  std::vector<std::string> choices;  // strings only; empty: anything
  bool no_empty_text = false;        // strings only
  std::string text() const;          // "1..8", ">= 0", "one of a | b", "not empty", or ""
};
/// Upper limit of steps, samples and the like: more than any run has, and exact in a double.
constexpr double kMaxCount = 1e12;
/// Upper limit of factors and rates: they fit f32.
constexpr double kMaxFactor = 1e30;
/// Lower limit of what must not become 0 in f32.
constexpr double kMinFactor = 1e-30;
Constraint at_least(double min);
Constraint greater_than(double min);
Constraint in_range(double min, double max);
/// min < value <= max.
Constraint above(double min, double max);
Constraint not_empty();
Constraint one_of(std::vector<std::string> choices);

/// An integer that may be left to the program: `auto` in the YAML.
struct AutoInt {
  std::optional<int64_t> value;  // empty: auto
  int64_t value_or(int64_t fallback) const { return value.value_or(fallback); }
};

struct Field {
  const char* key;
  const char* doc;
  Constraint constraint;
};

class FieldVisitor;

/// Base of the option structs of registered components (routers, optimizers, ...).
struct Options {
  virtual ~Options() = default;
  virtual void fields(FieldVisitor& v) = 0;
  /// What does not fit together among the options, each fine by itself; "" when all is well. The parser
  /// reports it.
  virtual std::string conflict() const { return ""; }
};
/// For components without options.
struct NoOptions final : Options {
  void fields(FieldVisitor&) override {}
};

/// The names registered for one kind of component, and fresh option structs for each (see registry.h).
class ChoiceSet {
 public:
  virtual ~ChoiceSet() = default;
  virtual std::vector<std::string> names() const = 0;  // sorted
  virtual std::string doc(const std::string& name) const = 0;
  virtual std::shared_ptr<Options> make_options(const std::string& name) const = 0;  // null: unknown name
};

/// A component picked by name with its own options: `router: {kind: top_k, score: sigmoid}`.
/// `kind` and the options stand in the same YAML map.
struct Choice {
  std::string kind;
  std::shared_ptr<Options> options;
};

/// A list of sections, seen through an interface so that visitors need no templates.
class SectionList {
 public:
  virtual ~SectionList() = default;
  virtual size_t size() const = 0;
  virtual void resize(size_t size) = 0;
  virtual void visit_item(size_t index, FieldVisitor& v) = 0;
};

/// Walks the fields of a config struct. Implementations: parser, printer, schema writer, explainer.
class FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;
  virtual void visit(const Field&, bool&) = 0;
  virtual void visit(const Field&, int64_t&) = 0;
  virtual void visit(const Field&, double&) = 0;
  virtual void visit(const Field&, std::string&) = 0;
  virtual void visit(const Field&, AutoInt&) = 0;
  virtual void visit(const Field&, std::vector<int64_t>&) = 0;
  virtual void visit(const Field&, std::vector<double>&) = 0;
  virtual void visit(const Field&, std::vector<std::string>&) = 0;
  virtual void visit_section(const Field&, const std::function<void(FieldVisitor&)>& fields) = 0;
  virtual void visit_list(const Field&, SectionList&) = 0;
  virtual void visit_choice(const Field&, Choice&, const ChoiceSet&) = 0;

  template <class T>
  void operator()(const char* key, T& member, const char* doc, Constraint constraint = {}) {
    const Field field{key, doc, std::move(constraint)};
    if constexpr (requires { member.fields(*this); }) {
      visit_section(field, [&member](FieldVisitor& v) { member.fields(v); });
    } else if constexpr (requires { member.front().fields(*this); }) {
      struct Adapter final : SectionList {
        explicit Adapter(T& list) : list(list) {}
        T& list;
        size_t size() const override { return list.size(); }
        void resize(size_t size) override { list.resize(size); }
        void visit_item(size_t index, FieldVisitor& v) override { list[index].fields(v); }
      } adapter(member);
      visit_list(field, adapter);
    } else {
      visit(field, member);
    }
  }
  /// A component chosen by `kind` among those registered in `set`.
  void choice(const char* key, Choice& member, const ChoiceSet& set, const char* doc) {
    visit_choice(Field{key, doc, {}}, member, set);
  }
};

/// Collects every problem of a config before anything is thrown.
class ConfigErrors {
 public:
  /// "config <path> (<origin>): <problem>"
  void add(const std::string& path, const Origin& origin, const std::string& problem);
  bool empty() const { return messages_.empty(); }
  const std::vector<std::string>& messages() const { return messages_; }
  /// Throws one UsageError naming all problems, if there are any.
  void throw_if_any() const;

 private:
  std::vector<std::string> messages_;
};

/// Looks up the origin of a dotted path ("model.moe.top_k") in a tree; the nearest existing parent otherwise.
Origin origin_of(const ConfigNode& root, std::string_view path);

/// Fills `fields` from `node`. Unknown keys, duplicate keys, wrong types and values outside the constraint
/// are added to `errors` with file, line and column, and with the nearest known key. Absent keys keep their
/// value.
void parse_fields(const ConfigNode& node, const std::string& path,
                  const std::function<void(FieldVisitor&)>& fields, ConfigErrors& errors);

/// Reads YAML (1.2 scalars). `extends: other.yaml`, or a list, is relative to the file: maps are merged key
/// by key, lists and scalars replaced, and a choice of another kind starts without the options of the old
/// one.
/// ${env:VAR:-default} and ${env:VAR} are expanded in scalars, $$ is a dollar sign. Problems go to `errors`;
/// the result is always a map. Limits: 1 MiB per file, depth 64, 64 files, no aliases, anchors or tags.
ConfigNode load_yaml_file(const std::string& path, ConfigErrors& errors);
ConfigNode load_yaml_text(const std::string& text, const std::string& source, ConfigErrors& errors);

/// Applies "a.b.c=value" (value is YAML) on top of a tree, as a file that extends it would; list items are
/// a.0.b. A leading "--" is accepted. A broken assignment changes nothing.
void apply_override(ConfigNode& root, const std::string& assignment, ConfigErrors& errors);

/// The resolved config as YAML that reads back to the same values. With `origins`, the tree that was parsed,
/// each value is followed by "# file:line:column", "# command line" or "# default".
std::string print_fields(const std::function<void(FieldVisitor&)>& fields,
                         const ConfigNode* origins = nullptr);
/// JSON Schema (draft 2020-12) of the struct.
std::string schema_of(const std::function<void(FieldVisitor&)>& fields);
/// Type, default, allowed values and documentation of one dotted key (or of every key of a section).
/// An unknown key throws UsageError with the nearest one.
std::string explain_field(const std::function<void(FieldVisitor&)>& fields, const std::string& path);

}  // namespace shoal
