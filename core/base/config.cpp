#include "core/base/config.h"

#include <algorithm>
#include <charconv>

#include "core/base/config_fields.h"
#include "core/base/config_scalar.h"
#include "core/base/text.h"
#include "core/base/yaml.h"

namespace shoal {

namespace {

const std::string kCommandLine = "command line";

std::vector<std::string> split_path(std::string_view path) {
  std::vector<std::string> parts;
  while (true) {
    const size_t dot = path.find('.');
    parts.emplace_back(path.substr(0, dot));
    if (dot == path.npos) return parts;
    path.remove_prefix(dot + 1);
  }
}

std::optional<size_t> parse_index(std::string_view text) {
  size_t index = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return index;
}

const ConfigNode* child(const ConfigNode& node, std::string_view part) {
  if (node.kind != ConfigNode::Kind::list) return node.find(part);
  const auto index = parse_index(part);
  return index && *index < node.items.size() ? &node.items[*index] : nullptr;
}

const std::string* kind_of(const ConfigNode& map) {
  const ConfigNode* kind = map.find("kind");
  return kind && kind->kind == ConfigNode::Kind::scalar ? &kind->scalar : nullptr;
}

void make_map(ConfigNode& node, const Origin& origin) {
  node = ConfigNode{};
  node.kind = ConfigNode::Kind::map;
  node.origin = origin;
}

void merge_maps(ConfigNode& base, ConfigNode over) {
  const std::string *base_kind = kind_of(base), *over_kind = kind_of(over);
  if (base_kind && over_kind && *base_kind != *over_kind) {
    base = std::move(over);
    return;
  }
  if (over_kind && !base_kind) {
    for (auto& entry : base.entries) entry.for_default_kind = true;
  }
  if (over.origin.line > 0) base.origin = over.origin;
  for (auto& entry : over.entries) {
    auto old = std::find_if(base.entries.begin(), base.entries.end(),
                            [&](const ConfigNode::Entry& e) { return e.key == entry.key; });
    if (old == base.entries.end()) {
      base.entries.push_back(std::move(entry));
    } else {
      old->key_origin = entry.key_origin;
      old->for_default_kind = false;
      merge_config(old->value, std::move(entry.value));
    }
  }
}

// A scalar that an override goes into: it becomes a map, because of the override.
void make_choice(ConfigNode& scalar, const Origin& origin) {
  expand_shorthand(scalar);
  scalar.origin = origin;
}

// Problem of one path component for an override, or "".
std::string step_down(ConfigNode*& at, const std::string& part, const std::string& path,
                      const Origin& origin) {
  if (at->kind == ConfigNode::Kind::list) {
    const auto index = parse_index(part);
    if (!index || *index >= at->items.size()) {
      return str("expected an index of the list '", path, "', which has ", at->items.size(), " items, got '",
                 shown(part), "'");
    }
    at = &at->items[*index];
    return "";
  }
  if (at->kind == ConfigNode::Kind::null) make_map(*at, origin);
  if (at->kind == ConfigNode::Kind::scalar) make_choice(*at, origin);
  ConfigNode* found = at->find(part);
  if (!found) {
    at->entries.push_back({part, origin, {}});
    found = &at->entries.back().value;
    found->origin = origin;
  }
  at = found;
  return "";
}

}  // namespace

std::string Origin::text() const {
  return line > 0 ? str(source, ":", line, ":", column) : source;
}

const ConfigNode* ConfigNode::find(std::string_view key) const {
  for (const auto& entry : entries) {
    if (entry.key == key) return &entry.value;
  }
  return nullptr;
}

ConfigNode* ConfigNode::find(std::string_view key) {
  return const_cast<ConfigNode*>(static_cast<const ConfigNode*>(this)->find(key));
}

std::string Constraint::text() const {
  if (!choices.empty()) return "one of " + join(choices, " | ");
  if (no_empty_text) return "not empty";
  if (min && max && !exclusive_min) return str(format_number(*min), "..", format_number(*max));
  const std::string lower = min ? str(exclusive_min ? "> " : ">= ", format_number(*min)) : "";
  const std::string upper = max ? str("<= ", format_number(*max)) : "";
  return lower + (min && max ? " and " : "") + upper;
}

Constraint at_least(double min) {
  Constraint out;
  out.min = min;
  return out;
}

Constraint greater_than(double min) {
  Constraint out = at_least(min);
  out.exclusive_min = true;
  return out;
}

Constraint in_range(double min, double max) {
  Constraint out = at_least(min);
  out.max = max;
  return out;
}

Constraint above(double min, double max) {
  Constraint out = greater_than(min);
  out.max = max;
  return out;
}

Constraint not_empty() {
  Constraint out;
  out.no_empty_text = true;
  return out;
}

Constraint one_of(std::vector<std::string> choices) {
  Constraint out;
  out.choices = std::move(choices);
  return out;
}

void ConfigErrors::add(const std::string& path, const Origin& origin, const std::string& problem) {
  messages_.push_back(str("config ", path, path.empty() ? "" : " ", "(", origin.text(), "): ", problem));
}

void ConfigErrors::throw_if_any() const {
  constexpr size_t kMaxShown = 50;
  if (messages_.empty()) return;
  if (messages_.size() == 1) throw UsageError(messages_.front());
  std::string all = str(messages_.size(), " problems in the config:");
  for (size_t i = 0; i < messages_.size() && i < kMaxShown; i++) all += "\n  " + messages_[i];
  if (messages_.size() > kMaxShown) all += str("\n  and ", messages_.size() - kMaxShown, " more");
  throw UsageError(all);
}

Origin origin_of(const ConfigNode& root, std::string_view path) {
  const ConfigNode* at = &root;
  for (const auto& part : split_path(path)) {
    const ConfigNode* next = child(*at, part);
    if (!next) break;
    at = next;
  }
  return at->origin;
}

void expand_shorthand(ConfigNode& scalar) {
  ConfigNode kind = std::move(scalar);
  make_map(scalar, kind.origin);
  ConfigNode::Entry entry{"kind", kind.origin, std::move(kind)};
  entry.shorthand = true;
  scalar.entries.push_back(std::move(entry));
}

void merge_config(ConfigNode& base, ConfigNode over) {
  using Kind = ConfigNode::Kind;
  if (over.kind == Kind::null && base.kind == Kind::map) return;
  if (base.kind == Kind::scalar && over.kind == Kind::map) expand_shorthand(base);
  if (base.kind == Kind::map && over.kind == Kind::scalar) expand_shorthand(over);
  if (base.kind == Kind::map && over.kind == Kind::map) {
    merge_maps(base, std::move(over));
  } else {
    base = std::move(over);
  }
}

void apply_override(ConfigNode& root, const std::string& assignment, ConfigErrors& errors) {
  const Origin origin{kCommandLine, 0, 0};
  const std::string_view text = std::string_view(assignment).substr(assignment.starts_with("--") ? 2 : 0);
  const size_t equals = text.find('=');
  if (equals == text.npos) {
    errors.add("", origin,
               str("expected key=value, got '", shown(assignment), "'; write model.layers=4, say"));
    return;
  }
  const std::string path(text.substr(0, equals));
  std::vector<std::string> parts = split_path(path);
  const bool has_empty = std::find(parts.begin(), parts.end(), "") != parts.end();
  std::string what;
  if (has_empty || parts.size() > kMaxYamlDepth || find_bad_byte(path, what) != path.npos) {
    errors.add(
        "", origin,
        str("expected a dotted key in front of '=', such as model.layers=4, got '", shown(assignment), "'"));
    return;
  }
  const size_t before = errors.messages().size();
  ConfigNode value = parse_yaml(std::string(text.substr(equals + 1)), kCommandLine, false, path, errors);
  if (errors.messages().size() != before) return;
  ConfigNode* at = &root;
  const std::string last = parts.back();
  parts.pop_back();
  std::string above;
  for (const auto& part : parts) {
    const std::string problem = step_down(at, part, above, origin);
    if (!problem.empty()) {
      errors.add(path, origin, problem);
      return;
    }
    above = join_path(above, part);
  }
  if (at->kind == ConfigNode::Kind::list) {
    const std::string problem = step_down(at, last, above, origin);
    if (problem.empty()) merge_config(*at, std::move(value));
    if (!problem.empty()) errors.add(path, origin, problem);
    return;
  }
  // As a map with one key, so that a new `kind` drops the options of the old one.
  ConfigNode over;
  make_map(over, origin);
  over.entries.push_back({last, origin, std::move(value)});
  if (at->kind == ConfigNode::Kind::null) make_map(*at, at->origin.line > 0 ? at->origin : origin);
  if (at->kind == ConfigNode::Kind::scalar) make_choice(*at, origin);
  merge_config(*at, std::move(over));
}

}  // namespace shoal
