#include <algorithm>

#include "core/base/config.h"
#include "core/base/config_fields.h"
#include "core/base/config_scalar.h"
#include "core/base/text.h"

namespace shoal {

namespace {

// Everything wrong with one config, in the order met. Unknown keys are completed last: what to suggest needs
// a walk over all fields, which must not run while a field is being filled.
struct Problem {
  std::string path;
  Origin origin;
  std::string text;
  std::string unknown_key;
  std::vector<std::string> known_keys;
};

// "expected WHAT (CONSTRAINT), got VALUE"
std::string mismatch(const char* what, const Constraint& constraint, const ConfigNode& value,
                     const char* fix = "") {
  const std::string allowed = constraint.text();
  return str("expected ", what, allowed.empty() ? "" : " (" + allowed + ")", ", got ", describe_value(value),
             fix);
}

const char* fix_for(const ConfigNode& value) {
  if (value.kind == ConfigNode::Kind::null) return "; remove the key to keep the default";
  if (value.quoted && scalar_type(value.scalar) != ScalarType::text) return "; remove the quotes";
  return "";
}

std::string check_range(const Constraint& constraint, long double value, const ConfigNode& node) {
  const bool low =
      constraint.min && (constraint.exclusive_min ? value <= *constraint.min : value < *constraint.min);
  const bool high = constraint.max && value > *constraint.max;
  return low || high ? str("expected ", constraint.text(), ", got ", shown(node.scalar)) : "";
}

bool is_plain(const ConfigNode& node) {
  return node.kind == ConfigNode::Kind::scalar && !node.quoted;
}

// read(): the value of one scalar, or the problem with it ("" when there is none).

std::string read(const ConfigNode& node, const Constraint& constraint, bool& out) {
  const auto value = is_plain(node) ? parse_bool(node.scalar) : std::nullopt;
  if (!value) return mismatch("true or false", constraint, node, fix_for(node));
  out = *value;
  return "";
}

std::string read_integer(const char* what, const ConfigNode& node, const Constraint& constraint,
                         int64_t& out) {
  if (!is_plain(node)) return mismatch(what, constraint, node, fix_for(node));
  switch (parse_integer(node.scalar, out)) {
    case IntegerResult::ok:
      return check_range(constraint, out, node);
    case IntegerResult::not_a_number:
      break;
    case IntegerResult::not_integral:
      return mismatch(what, constraint, node, ", which has a fraction");
    case IntegerResult::out_of_range:
      return mismatch(what, constraint, node, ", which does not fit in 64 bits");
  }
  return mismatch(what, constraint, node);
}

std::string read(const ConfigNode& node, const Constraint& constraint, int64_t& out) {
  return read_integer("an integer", node, constraint, out);
}

std::string read(const ConfigNode& node, const Constraint& constraint, AutoInt& out) {
  if (node.kind == ConfigNode::Kind::scalar && node.scalar == "auto") {
    out.value.reset();
    return "";
  }
  int64_t value = 0;
  std::string problem = read_integer("an integer or auto", node, constraint, value);
  if (problem.empty()) out.value = value;
  return problem;
}

std::string read(const ConfigNode& node, const Constraint& constraint, double& out) {
  if (!is_plain(node)) return mismatch("a number", constraint, node, fix_for(node));
  switch (parse_number(node.scalar, out)) {
    case NumberResult::ok:
      return check_range(constraint, out, node);
    case NumberResult::not_a_number:
      break;
    case NumberResult::not_finite:
      return mismatch("a finite number", constraint, node);
    case NumberResult::out_of_range:
      return mismatch("a number", constraint, node, ", which no double can hold");
  }
  return mismatch("a number", constraint, node);
}

// Any scalar is text as it stands: `name: 007` needs no quotes.
std::string read(const ConfigNode& node, const Constraint& constraint, std::string& out) {
  if (node.kind == ConfigNode::Kind::null) {
    return mismatch("text", constraint, node,
                    "; write '' for an empty text or remove the key to keep the default");
  }
  if (node.kind != ConfigNode::Kind::scalar) return mismatch("text", constraint, node);
  const auto& choices = constraint.choices;
  if (!choices.empty() && std::find(choices.begin(), choices.end(), node.scalar) == choices.end()) {
    return str("expected ", constraint.text(), ", got '", shown(node.scalar), "'",
               suggest(node.scalar, choices));
  }
  if (constraint.no_empty_text && node.scalar.empty()) return "expected a text that is not empty, got ''";
  out = node.scalar;
  return "";
}

const char* item_name(const int64_t*) {
  return "integers";
}
const char* item_name(const double*) {
  return "numbers";
}
const char* item_name(const std::string*) {
  return "texts";
}

// Fills the fields of one section from one map.
class Parser final : public FieldVisitor {
 public:
  // map: null when the section is absent; then only the defaults of choices are filled in.
  Parser(std::vector<Problem>& problems, const ConfigNode* map, std::string path)
      : problems_(problems), map_(map), path_(std::move(path)) {}

  void visit(const Field& f, bool& v) override { scalar(f, v); }
  void visit(const Field& f, int64_t& v) override { scalar(f, v); }
  void visit(const Field& f, double& v) override { scalar(f, v); }
  void visit(const Field& f, std::string& v) override { scalar(f, v); }
  void visit(const Field& f, AutoInt& v) override { scalar(f, v); }
  void visit(const Field& f, std::vector<int64_t>& v) override { list(f, v); }
  void visit(const Field& f, std::vector<double>& v) override { list(f, v); }
  void visit(const Field& f, std::vector<std::string>& v) override { list(f, v); }

  void visit_section(const Field& f, const std::function<void(FieldVisitor&)>& section) override {
    parse_section(problems_, take(f), join_path(path_, f.key), section);
  }

  void visit_list(const Field& f, SectionList& sections) override {
    const ConfigNode* node = take(f);
    const std::string path = join_path(path_, f.key);
    if (node && node->kind != ConfigNode::Kind::list) {
      problems_.push_back(
          {path, node->origin, "expected a list of sections, got " + describe_value(*node), "", {}});
      node = nullptr;
    }
    if (node) {
      // Through zero, so that no item keeps values of the default list.
      sections.resize(0);
      sections.resize(node->items.size());
    }
    for (size_t i = 0; i < sections.size(); i++) {
      parse_section(problems_, node ? &node->items[i] : nullptr, join_path(path, std::to_string(i)),
                    [&](FieldVisitor& v) { sections.visit_item(i, v); });
    }
  }

  void visit_choice(const Field& f, Choice& choice, const ChoiceSet& set) override;

  // Parses `section` from `node`, which must be a map; null stands for an empty one.
  static void parse_section(std::vector<Problem>& problems, const ConfigNode* node, const std::string& path,
                            const std::function<void(FieldVisitor&)>& section) {
    const ConfigNode* map = node && node->kind == ConfigNode::Kind::map ? node : nullptr;
    if (node && !map && node->kind != ConfigNode::Kind::null && !node->refused) {
      problems.push_back(
          {path, node->origin, "expected a section (a map), got " + describe_value(*node), "", {}});
    }
    Parser parser(problems, map, path);
    section(parser);
    parser.report_unknown();
  }

 private:
  const ConfigNode* take(const Field& f) {
    known_.push_back(f.key);
    const ConfigNode* node = map_ ? map_->find(f.key) : nullptr;
    return node && !node->refused ? node : nullptr;
  }

  template <class T>
  void scalar(const Field& f, T& out) {
    const ConfigNode* node = take(f);
    if (!node) return;
    T value{};
    std::string problem = read(*node, f.constraint, value);
    if (problem.empty()) {
      out = std::move(value);
    } else {
      problems_.push_back({join_path(path_, f.key), node->origin, std::move(problem), "", {}});
    }
  }

  template <class T>
  void list(const Field& f, std::vector<T>& out) {
    const ConfigNode* node = take(f);
    if (!node) return;
    const std::string path = join_path(path_, f.key);
    if (node->kind == ConfigNode::Kind::scalar) {
      // A list of one needs no brackets.
      T value{};
      std::string problem = read(*node, f.constraint, value);
      if (problem.empty()) {
        out.assign(1, std::move(value));
      } else {
        const T* item = nullptr;
        problems_.push_back({path, node->origin, str("a list of ", item_name(item), ": ", problem), "", {}});
      }
      return;
    }
    if (node->kind != ConfigNode::Kind::list) {
      const char* fix = node->kind == ConfigNode::Kind::null ? "; write [] for an empty list" : "";
      const std::string got = describe_value(*node);
      const T* item = nullptr;
      problems_.push_back(
          {path, node->origin, str("expected a list of ", item_name(item), ", got ", got, fix), "", {}});
      return;
    }
    std::vector<T> values(node->items.size());
    bool good = true;
    for (size_t i = 0; i < values.size(); i++) {
      if (node->items[i].refused) {
        good = false;
        continue;
      }
      std::string problem = read(node->items[i], f.constraint, values[i]);
      if (problem.empty()) continue;
      good = false;
      const std::string item_path = join_path(path, std::to_string(i));
      problems_.push_back({item_path, node->items[i].origin, std::move(problem), "", {}});
    }
    if (good) out = std::move(values);
  }

  void report_unknown() {
    if (!map_) return;
    for (const auto& entry : map_->entries) {
      if (std::find(known_.begin(), known_.end(), entry.key) != known_.end()) continue;
      if (entry.for_default_kind && kind_changed_) continue;
      const std::string got = entry.shorthand ? describe_value(entry.value) : "";
      if (entry.shorthand) {
        problems_.push_back({path_, entry.key_origin, "expected a section (a map), got " + got, "", {}});
      } else {
        problems_.push_back({join_path(path_, shown(entry.key)), entry.key_origin, "", entry.key, known_});
      }
    }
  }

  std::vector<Problem>& problems_;
  const ConfigNode* map_;
  std::string path_;
  std::vector<std::string> known_;
  bool kind_changed_ = false;
};

// Options are shared by copies of a config; the one being parsed gets its own.
std::shared_ptr<Options> own_copy(const Choice& choice, const ChoiceSet& set) {
  auto copy = set.make_options(choice.kind);
  if (!copy || !choice.options) return copy;
  ConfigErrors errors;
  const std::string text = print_fields([&](FieldVisitor& v) { choice.options->fields(v); });
  const ConfigNode node = load_yaml_text(text, "default", errors);
  parse_fields(
      node, "", [&](FieldVisitor& v) { copy->fields(v); }, errors);
  SHOAL_CHECK(errors.empty(), "config: the defaults of kind '", choice.kind,
              "' break their own limits: ", errors.messages().front());
  return copy;
}

void Parser::visit_choice(const Field& f, Choice& choice, const ChoiceSet& set) {
  const ConfigNode* node = take(f);
  const std::string path = join_path(path_, f.key);
  const auto names = set.names();
  std::string kind = choice.kind;
  const ConfigNode* map = node && node->kind == ConfigNode::Kind::map ? node : nullptr;
  const ConfigNode* kind_node = map ? map->find("kind") : node;
  if (node && node->kind == ConfigNode::Kind::list) {
    problems_.push_back(
        {path, node->origin, "expected a kind or a map with kind, got " + describe_value(*node), "", {}});
    kind_node = nullptr;
  } else if (kind_node && kind_node->refused) {
    return;
  } else if (kind_node && kind_node->kind == ConfigNode::Kind::scalar) {
    kind = kind_node->scalar;
  } else if (kind_node && kind_node != node) {
    problems_.push_back({path + ".kind",
                         kind_node->origin,
                         "expected one of " + join(names, " | ") + ", got " + describe_value(*kind_node),
                         "",
                         {}});
    return;
  }
  if (std::find(names.begin(), names.end(), kind) == names.end()) {
    if (!node) return;
    const std::string problem = kind.empty() ? str("expected kind: one of ", join(names, " | "))
                                             : str("unknown kind '", shown(kind), "'", suggest(kind, names),
                                                   "; registered: ", join(names, " | "));
    const bool given = kind_node && kind_node->kind == ConfigNode::Kind::scalar;
    problems_.push_back(
        {given && map ? path + ".kind" : path, given ? kind_node->origin : node->origin, problem, "", {}});
    return;
  }
  const bool changed = kind != choice.kind;
  if (changed) choice = Choice{kind, nullptr};
  if (!choice.options || choice.options.use_count() > 1) choice.options = own_copy(choice, set);
  Parser parser(problems_, map, path);
  parser.known_.emplace_back("kind");
  parser.kind_changed_ = changed;
  const size_t before = problems_.size();
  if (changed && map) {
    // Values that were written for the default kind do not pass to this one.
    ConfigNode own = *map;
    std::erase_if(own.entries, [](const ConfigNode::Entry& entry) { return entry.for_default_kind; });
    parser.map_ = &own;
    choice.options->fields(parser);
    parser.report_unknown();
  } else {
    choice.options->fields(parser);
    parser.report_unknown();
  }
  if (!node || problems_.size() != before) return;
  std::string conflict = choice.options->conflict();
  if (!conflict.empty()) problems_.push_back({path, node->origin, std::move(conflict), "", {}});
}

}  // namespace

void parse_fields(const ConfigNode& node, const std::string& path,
                  const std::function<void(FieldVisitor&)>& fields, ConfigErrors& errors) {
  std::vector<Problem> problems;
  Parser::parse_section(problems, &node, path, fields);
  std::vector<FieldInfo> all;
  for (const auto& problem : problems) {
    const bool unknown = !problem.unknown_key.empty() || problem.text.empty();
    if (unknown && all.empty()) all = describe_fields(fields);
    errors.add(problem.path, problem.origin,
               unknown ? unknown_key_text(problem.unknown_key, problem.known_keys, all, path) : problem.text);
  }
}

}  // namespace shoal
