// Every key of the experiment schema, found by walking the schema itself: a new key, or the options of a new
// kind, joins the tests that use this on its own.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/base/config_fields.h"
#include "core/base/text.h"
#include "launch/train_config.h"

namespace shoal::testing {

/// YAML in block style, with the place of one value.
class YamlTree {
 public:
  /// `path` is dotted; "0" stands for the only item of a list. `value` is YAML. The last watched value is the
  /// one that line() and column() are about.
  void set(const std::string& path, const std::string& value, bool watched = false) {
    YamlTree* at = this;
    size_t begin = 0;
    while (begin <= path.size()) {
      const size_t end = std::min(path.find('.', begin), path.size());
      at = &at->child(path.substr(begin, end - begin));
      begin = end + 1;
    }
    at->children_.clear();
    at->value_ = value;
    at->watched_ = watched;
  }
  void remove(const std::string& key) {
    std::erase_if(children_, [&](const auto& entry) { return entry.first == key; });
  }
  std::string text() {
    line_ = 0;
    std::string out;
    write(out, 0, *this);
    return out;
  }
  int line() const { return line_; }  // of the watched value, after text()
  int column() const { return column_; }

 private:
  YamlTree& child(const std::string& key) {
    for (auto& [name, tree] : children_) {
      if (name == key) return tree;
    }
    return children_.emplace_back(key, YamlTree{}).second;
  }
  void write(std::string& out, size_t indent, YamlTree& root) {
    for (auto& [key, tree] : children_) {
      if (key == "0") {  // an item begins with the dash in front of its first key
        const size_t start = out.size();
        tree.write(out, indent + 2, root);
        out[start + indent] = '-';
        continue;
      }
      out += std::string(indent, ' ') + key + ":";
      if (tree.children_.empty()) {
        out += ' ';
        if (tree.watched_) {
          root.line_ = 1 + static_cast<int>(std::count(out.begin(), out.end(), '\n'));
          root.column_ = static_cast<int>(out.size() - out.rfind('\n'));
          if (root.line_ == 1) root.column_ = static_cast<int>(out.size()) + 1;
        }
        out += tree.value_;
      }
      out += '\n';
      tree.write(out, indent + 2, root);
    }
  }

  std::vector<std::pair<std::string, YamlTree>> children_;
  std::string value_;
  bool watched_ = false;
  int line_ = 0, column_ = 0;
};

/// One key, section or choice of the schema.
struct SchemaKey {
  std::string path;  // "model.moe.router.score"
  FieldInfo info;
  std::vector<std::pair<std::string, std::string>> kinds;     // choices above it: path and kind
  std::vector<std::pair<std::string, std::string>> required;  // texts beside or above it that have no default

  bool is_scalar() const {
    return info.type != FieldType::section && info.type != FieldType::section_list &&
           info.type != FieldType::choice;
  }
  bool is_required() const {
    return is_scalar() && !info.is_list && info.constraint.no_empty_text &&
           info.default_values.front().empty();
  }
  /// A config that is right, with everything around this key, but without the key.
  YamlTree tree() const {
    YamlTree tree;
    tree.set("data.text", "[text.txt]");
    for (const auto& [path, kind] : kinds) tree.set(path + ".kind", kind);
    for (const auto& [path, value] : required) {
      if (path != this->path) tree.set(path, value);
    }
    return tree;
  }
};

inline void walk_schema(const std::vector<FieldInfo>& fields, const std::string& prefix,
                        const SchemaKey& above, std::vector<SchemaKey>& out) {
  SchemaKey base = above;
  for (const FieldInfo& field : fields) {
    base.info = field;
    if (base.is_required()) base.required.emplace_back(join_path(prefix, field.key), "somewhere");
  }
  for (const FieldInfo& field : fields) {
    SchemaKey key = base;
    key.path = join_path(prefix, field.key);
    key.info = field;
    out.push_back(key);
    const bool list = field.type == FieldType::section_list;
    walk_schema(field.children, list ? key.path + ".0" : key.path, key, out);
    for (const auto& kind : field.kinds) {
      SchemaKey inner = key;
      inner.kinds.emplace_back(key.path, kind.name);
      walk_schema(kind.options, key.path, inner, out);
    }
  }
}

/// "model.moe.router.score" once per kind that has it, in the order of the schema.
inline std::vector<SchemaKey> every_key() {
  TrainConfig config;
  config.model.options = ModelRegistry::instance().make_options(config.model.kind);
  std::vector<SchemaKey> keys;
  walk_schema(describe_fields([&](FieldVisitor& v) { config.fields(v); }), "", {}, keys);
  return keys;
}

/// Loads a text as `shoal config` does; the problems, without their common heading, and the config if there
/// are none.
struct Loaded {
  std::vector<std::string> problems;
  std::string yaml;  // the resolved config
};
inline Loaded load(const std::string& text, const std::vector<std::string>& overrides = {},
                   int world_size = 1) {
  Loaded out;
  try {
    const LoadedConfig loaded = load_train_config_text(text, "exp.yaml", overrides, world_size);
    out.yaml = to_yaml(loaded.config);
  } catch (const UsageError& e) {
    std::string all = e.what();
    if (all.find(" problems in the config:\n") == std::string::npos) return {{all}, ""};
    for (size_t at = all.find("\n  "); at != std::string::npos;) {
      const size_t next = all.find("\n  ", at + 1);
      out.problems.push_back(all.substr(at + 3, next == std::string::npos ? next : next - at - 3));
      at = next;
    }
  }
  return out;
}

}  // namespace shoal::testing
