#include <algorithm>

#include "core/base/config.h"
#include "core/base/config_fields.h"
#include "core/base/config_scalar.h"
#include "core/base/text.h"

namespace shoal {

namespace {

// What a path names: one field, or the fields of the same name of several kinds.
struct Match {
  const FieldInfo* field;
  std::string kind;  // the kind whose option it is, or ""
};

std::vector<const FieldInfo::Kind*> current_first(const FieldInfo& choice) {
  std::vector<const FieldInfo::Kind*> kinds;
  for (const auto& kind : choice.kinds) kinds.push_back(&kind);
  std::stable_partition(kinds.begin(), kinds.end(),
                        [&](const auto* k) { return k->name == choice.current_kind; });
  return kinds;
}

void add_matches(const std::vector<FieldInfo>& fields, const std::string& key, const std::string& kind,
                 std::vector<Match>& out) {
  for (const auto& field : fields) {
    if (field.key == key) out.push_back({&field, kind});
  }
}

std::vector<Match> matches_in(const FieldInfo& parent, const std::string& key) {
  std::vector<Match> out;
  add_matches(parent.children, key, "", out);
  for (const auto* kind : current_first(parent)) add_matches(kind->options, key, kind->name, out);
  return out;
}

std::vector<std::string> keys_of(const FieldInfo& parent) {
  std::vector<std::string> keys;
  auto add = [&](const std::string& key) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  };
  for (const auto& field : parent.children) add(field.key);
  if (parent.type == FieldType::choice) add("kind");
  for (const auto& kind : parent.kinds) {
    for (const auto& option : kind.options) add(option.key);
  }
  return keys;
}

bool is_index(const std::string& part) {
  return !part.empty() && part.find_first_not_of("0123456789") == part.npos;
}

// "integer >= 1, default 2"
std::string summary(const FieldInfo& field) {
  const std::string allowed = field.constraint.text();
  std::string out = field.type_text() + (allowed.empty() ? "" : ", " + allowed);
  const std::string value = field.default_text();
  return value.empty() ? out : str(out, ", default ", value);
}

// One line per field: path, summary and documentation, the first two in columns.
std::string table(const std::vector<FieldInfo>& fields, const std::string& path, const std::string& indent) {
  constexpr size_t kMaxColumn = 56;
  size_t path_width = 0, summary_width = 0;
  for (const auto& field : fields) {
    path_width = std::max(path_width, std::min(kMaxColumn, join_path(path, field.key).size()));
    summary_width = std::max(summary_width, std::min(kMaxColumn, summary(field).size()));
  }
  auto column = [](std::string text, size_t width) {
    if (text.size() < width) text.append(width - text.size(), ' ');
    return text + "  ";
  };
  std::string out;
  for (const auto& field : fields) {
    out += indent + column(join_path(path, field.key), path_width) + column(summary(field), summary_width) +
           field.doc + "\n";
  }
  return out;
}

std::string explain_choice(const FieldInfo& field, const std::string& path) {
  std::string out = "  kinds:\n";
  size_t width = 0;
  for (const auto& kind : field.kinds) width = std::max(width, kind.name.size());
  for (const auto* kind : current_first(field)) {
    out += "    " + kind->name + std::string(width - kind->name.size() + 2, ' ') + kind->doc + "\n";
  }
  for (const auto* kind : current_first(field)) {
    const bool current = kind->name == field.current_kind;
    const std::string title = str("  options of ", kind->name, current ? " (the default kind)" : "");
    if (!kind->expanded) {
      out += title + ": as above\n";
    } else if (kind->options.empty()) {
      out += title + ": none\n";
    } else {
      out += title + ":\n" + table(kind->options, path, "    ");
    }
  }
  return out;
}

std::string explain_one(const FieldInfo& field, const std::string& path, const std::string& kind) {
  const std::string value = field.default_text(), allowed = field.constraint.text();
  std::string out = path + ": " + field.type_text() + (value.empty() ? "" : ", default " + value) + "\n";
  out += "  " + field.doc + "\n";
  if (!allowed.empty()) out += std::string("  allowed: ") + (field.is_list ? "each " : "") + allowed + "\n";
  if (!kind.empty()) out += "  when " + path.substr(0, path.rfind('.')) + ".kind is " + kind + "\n";
  if (field.type == FieldType::section) out += "  keys:\n" + table(field.children, path, "    ");
  if (field.type == FieldType::section_list)
    out += "  keys of each item:\n" + table(field.children, path + ".N", "    ");
  if (field.type == FieldType::choice) out += explain_choice(field, path);
  return out;
}

}  // namespace

std::string explain_field(const std::function<void(FieldVisitor&)>& fields, const std::string& path) {
  FieldInfo root;
  root.children = describe_fields(fields);
  if (path.empty()) return table(root.children, "", "");
  std::vector<Match> found = {{&root, ""}};
  std::string above, rest = path;
  while (!rest.empty()) {
    const std::string part = rest.substr(0, rest.find('.'));
    rest = part.size() == rest.size() ? "" : rest.substr(part.size() + 1);
    const FieldInfo& parent = *found.front().field;
    if (parent.type == FieldType::section_list && is_index(part)) {
      above = join_path(above, part);
      continue;
    }
    if (parent.type == FieldType::choice && part == "kind" && rest.empty())
      return explain_one(parent, above, "");
    std::vector<Match> next;
    for (const auto& match : found) {
      for (const auto& below : matches_in(*match.field, part)) next.push_back(below);
    }
    if (next.empty()) {
      const auto known = keys_of(parent);
      const std::string where = join_path(above, shown(part));
      const bool leaf = known.empty() && &parent != &root;
      throw UsageError(
          str("config key ", where, ": ",
              leaf ? str(above, " has no keys below it") : unknown_key_text(part, known, root.children, "")));
    }
    found = std::move(next);
    above = join_path(above, part);
  }
  std::string out;
  for (const auto& match : found) out += explain_one(*match.field, path, match.kind);
  return out;
}

}  // namespace shoal
