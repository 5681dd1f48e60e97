// A config struct as data: the tree of its keys with types, defaults and documentation, for every registered
// kind of every choice. Made from fields(); used by the unknown-key messages, the JSON Schema and --explain.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/base/config.h"

namespace shoal {

enum class FieldType { boolean, integer, number, text, auto_integer, section, section_list, choice };

struct FieldInfo {
  struct Kind {
    std::string name, doc;
    std::vector<FieldInfo> options;
    bool expanded = true;  // false: the same choice again inside itself, whose options are not repeated
  };

  std::string key, doc;
  FieldType type = FieldType::section;
  bool is_list = false;                     // list of scalars of `type`
  Constraint constraint;                    // of the value, or of each item
  std::vector<std::string> default_values;  // one text, or one per list item; strings without quotes
  std::vector<FieldInfo> children;          // section, section_list (of one item)
  std::string current_kind;                 // choice
  std::vector<Kind> kinds;                  // choice

  /// "integer", "list of text", "section", ...
  std::string type_text() const;
  /// The default as one-line YAML; "" for sections.
  std::string default_text() const;
};

/// `fields` is called with live objects: their current values are the defaults. Lists are resized and
/// restored.
std::vector<FieldInfo> describe_fields(const std::function<void(FieldVisitor&)>& fields);

/// "unknown key, did you mean ...": the nearest of `known`, and where among all fields (rooted at `prefix`)
/// the very key exists. Without either, the known keys.
std::string unknown_key_text(const std::string& key, const std::vector<std::string>& known,
                             const std::vector<FieldInfo>& all, const std::string& prefix);

/// prefix.key, or key when the prefix is empty.
std::string join_path(const std::string& prefix, std::string_view key);

}  // namespace shoal
