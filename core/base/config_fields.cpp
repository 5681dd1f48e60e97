#include "core/base/config_fields.h"

#include <algorithm>

#include "core/base/config_scalar.h"
#include "core/base/text.h"

namespace shoal {

namespace {

class Describer final : public FieldVisitor {
 public:
  explicit Describer(std::vector<const ChoiceSet*>& open_choices) : open_choices_(open_choices) {}

  std::vector<FieldInfo> fields;

  void visit(const Field& f, bool& v) override { add(f, FieldType::boolean, {v ? "true" : "false"}); }
  void visit(const Field& f, int64_t& v) override { add(f, FieldType::integer, {std::to_string(v)}); }
  void visit(const Field& f, double& v) override { add(f, FieldType::number, {format_number(v)}); }
  void visit(const Field& f, std::string& v) override { add(f, FieldType::text, {v}); }
  void visit(const Field& f, AutoInt& v) override {
    add(f, FieldType::auto_integer, {v.value ? std::to_string(*v.value) : "auto"});
  }
  void visit(const Field& f, std::vector<int64_t>& v) override {
    add_list(f, FieldType::integer, v, [](int64_t item) { return std::to_string(item); });
  }
  void visit(const Field& f, std::vector<double>& v) override {
    add_list(f, FieldType::number, v, [](double item) { return format_number(item); });
  }
  void visit(const Field& f, std::vector<std::string>& v) override {
    add_list(f, FieldType::text, v, [](const std::string& item) { return item; });
  }
  void visit_section(const Field& f, const std::function<void(FieldVisitor&)>& section) override {
    add(f, FieldType::section, {}).children = inner(section);
  }
  void visit_list(const Field& f, SectionList& list) override {
    // A list may be empty: one item more than it has is described and removed again.
    const size_t size = list.size();
    list.resize(size + 1);
    auto children = inner([&](FieldVisitor& v) { list.visit_item(size, v); });
    list.resize(size);
    add(f, FieldType::section_list, {}).children = std::move(children);
  }
  void visit_choice(const Field& f, Choice& choice, const ChoiceSet& set) override {
    const bool repeated = std::count(open_choices_.begin(), open_choices_.end(), &set) > 0;
    std::vector<FieldInfo::Kind> kinds;
    open_choices_.push_back(&set);
    for (const auto& name : set.names()) {
      FieldInfo::Kind kind{name, set.doc(name), {}, !repeated};
      const bool current = name == choice.kind && choice.options;
      const auto options = current ? choice.options : set.make_options(name);
      if (!repeated && options) kind.options = inner([&](FieldVisitor& v) { options->fields(v); });
      kinds.push_back(std::move(kind));
    }
    open_choices_.pop_back();
    FieldInfo& info = add(f, FieldType::choice, {choice.kind});
    info.current_kind = choice.kind;
    info.kinds = std::move(kinds);
  }

 private:
  FieldInfo& add(const Field& f, FieldType type, std::vector<std::string> default_values) {
    FieldInfo info;
    info.key = f.key;
    info.doc = f.doc;
    info.type = type;
    info.constraint = f.constraint;
    info.default_values = std::move(default_values);
    return fields.emplace_back(std::move(info));
  }
  template <class T, class F>
  void add_list(const Field& f, FieldType type, const std::vector<T>& values, F text_of) {
    std::vector<std::string> texts;
    texts.reserve(values.size());
    for (const auto& value : values) texts.push_back(text_of(value));
    add(f, type, std::move(texts)).is_list = true;
  }
  std::vector<FieldInfo> inner(const std::function<void(FieldVisitor&)>& section) {
    Describer describer(open_choices_);
    section(describer);
    return std::move(describer.fields);
  }

  std::vector<const ChoiceSet*>& open_choices_;
};

bool has_key(const std::vector<FieldInfo>& fields, const std::string& key) {
  return std::any_of(fields.begin(), fields.end(), [&](const FieldInfo& f) { return f.key == key; });
}

void add_sections_with_key(const std::vector<FieldInfo>& fields, const std::string& key,
                           const std::string& path, std::vector<std::string>& out) {
  if (has_key(fields, key)) out.push_back(path.empty() ? "the top level" : path);
  for (const auto& field : fields) {
    const std::string below = join_path(path, field.key);
    add_sections_with_key(field.children, key, below, out);
    for (const auto& kind : field.kinds) {
      const size_t before = out.size();
      add_sections_with_key(kind.options, key, below, out);
      if (has_key(kind.options, key)) out[before] = str(below, " (kind ", kind.name, ")");
    }
  }
}

}  // namespace

std::string FieldInfo::type_text() const {
  std::string name;
  switch (type) {
    case FieldType::boolean:
      name = "true or false";
      break;
    case FieldType::integer:
      name = "integer";
      break;
    case FieldType::number:
      name = "number";
      break;
    case FieldType::text:
      name = "text";
      break;
    case FieldType::auto_integer:
      name = "integer or auto";
      break;
    case FieldType::section:
      name = "section";
      break;
    case FieldType::section_list:
      name = "list of sections";
      break;
    case FieldType::choice:
      name = "choice";
      break;
  }
  return is_list ? "list of " + name : name;
}

std::string FieldInfo::default_text() const {
  if (type == FieldType::section || type == FieldType::section_list) return "";
  if (type == FieldType::choice && current_kind.empty()) return "";
  std::vector<std::string> texts;
  for (const auto& value : default_values) {
    texts.push_back(type == FieldType::text || type == FieldType::choice ? quote_if_needed(value) : value);
  }
  return is_list ? "[" + join(texts, ", ") + "]" : texts.front();
}

std::vector<FieldInfo> describe_fields(const std::function<void(FieldVisitor&)>& fields) {
  std::vector<const ChoiceSet*> open_choices;
  Describer describer(open_choices);
  fields(describer);
  return std::move(describer.fields);
}

std::string unknown_key_text(const std::string& key, const std::vector<std::string>& known,
                             const std::vector<FieldInfo>& all, const std::string& prefix) {
  const std::string suggestion = suggest(key, known);
  std::vector<std::string> homes;
  add_sections_with_key(all, key, prefix, homes);
  std::string out = "unknown key" + suggestion;
  if (!homes.empty()) {
    const std::string belongs = str("'", key, "' belongs to ", join(homes, " or "));
    out += suggestion.empty() ? "; " + belongs : " (" + belongs + ")";
  } else if (suggestion.empty()) {
    out += known.empty() ? "; this section has no keys" : "; known keys: " + join(known, ", ");
  }
  return out;
}

std::string join_path(const std::string& prefix, std::string_view key) {
  return prefix.empty() ? std::string(key) : str(prefix, ".", key);
}

}  // namespace shoal
