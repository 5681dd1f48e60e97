#include <algorithm>

#include "core/base/config.h"
#include "core/base/config_fields.h"
#include "core/base/config_scalar.h"
#include "core/base/text.h"

namespace shoal {

namespace {

struct Line {
  std::string text;
  std::string origin;  // empty: a line that holds no value
};

// Writes one section; `node` is the same section in the tree that the values came from, or null.
class Printer final : public FieldVisitor {
 public:
  Printer(std::vector<Line>& lines, std::string indent, const ConfigNode* node)
      : lines_(lines), indent_(std::move(indent)), node_(node) {}

  void visit(const Field& f, bool& v) override { value(f, v ? "true" : "false"); }
  void visit(const Field& f, int64_t& v) override { value(f, std::to_string(v)); }
  void visit(const Field& f, double& v) override { value(f, format_number(v)); }
  void visit(const Field& f, std::string& v) override { value(f, quote_if_needed(v)); }
  void visit(const Field& f, AutoInt& v) override { value(f, v.value ? std::to_string(*v.value) : "auto"); }
  void visit(const Field& f, std::vector<int64_t>& v) override {
    list(f, v, [](int64_t item) { return std::to_string(item); });
  }
  void visit(const Field& f, std::vector<double>& v) override {
    list(f, v, [](double item) { return format_number(item); });
  }
  void visit(const Field& f, std::vector<std::string>& v) override { list(f, v, quote_if_needed); }

  void visit_section(const Field& f, const std::function<void(FieldVisitor&)>& section) override {
    const size_t header = add(str(f.key, ":"), "");
    Printer inner(lines_, indent_ + "  ", find(f.key));
    section(inner);
    if (lines_.size() == header + 1) lines_[header].text += " {}";
  }

  void visit_list(const Field& f, SectionList& sections) override {
    const ConfigNode* node = find(f.key);
    const size_t header = add(str(f.key, ":"), "");
    if (sections.size() == 0) {
      lines_[header] = {indent_ + f.key + ": []", origin_text(node)};
    }
    for (size_t i = 0; i < sections.size(); i++) {
      const bool given = node && node->kind == ConfigNode::Kind::list && i < node->items.size();
      const size_t first = lines_.size();
      Printer inner(lines_, indent_ + "    ", given ? &node->items[i] : nullptr);
      sections.visit_item(i, inner);
      if (lines_.size() == first) lines_.push_back({indent_ + "    {}", ""});
      lines_[first].text[indent_.size() + 2] = '-';
    }
  }

  void visit_choice(const Field& f, Choice& choice, const ChoiceSet& set) override {
    const ConfigNode* node = find(f.key);
    if (choice.kind.empty()) {
      add(str(f.key, ": null"), origin_text(node));
      return;
    }
    add(str(f.key, ":"), "");
    Printer inner(lines_, indent_ + "  ", node);
    // `router: top_k` has its kind where the map would be.
    const bool shorthand = node && node->kind == ConfigNode::Kind::scalar;
    inner.add("kind: " + quote_if_needed(choice.kind), origin_text(shorthand ? node : inner.find("kind")));
    const auto options = choice.options ? choice.options : set.make_options(choice.kind);
    if (options) options->fields(inner);
  }

 private:
  const ConfigNode* find(std::string_view key) const { return node_ ? node_->find(key) : nullptr; }
  static std::string origin_text(const ConfigNode* node) {
    return node ? node->origin.text() : Origin{}.text();
  }

  size_t add(const std::string& text, std::string origin) {
    lines_.push_back({indent_ + text, std::move(origin)});
    return lines_.size() - 1;
  }
  void value(const Field& f, const std::string& text) {
    add(str(f.key, ": ", text), origin_text(find(f.key)));
  }
  template <class T, class F>
  void list(const Field& f, const std::vector<T>& items, F text_of) {
    std::vector<std::string> texts;
    texts.reserve(items.size());
    for (const auto& item : items) texts.push_back(text_of(item));
    value(f, "[" + join(texts, ", ") + "]");
  }

  std::vector<Line>& lines_;
  std::string indent_;
  const ConfigNode* node_;
};

// A source may be any file name; a line end in it would end the comment.
std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, '?');
  return text;
}

}  // namespace

std::string print_fields(const std::function<void(FieldVisitor&)>& fields, const ConfigNode* origins) {
  // A few long values do not push all comments to the right.
  constexpr size_t kMaxCommentColumn = 60;
  std::vector<Line> lines;
  Printer printer(lines, "", origins);
  fields(printer);
  size_t width = 0;
  for (const auto& line : lines) {
    if (!line.origin.empty() && line.text.size() <= kMaxCommentColumn)
      width = std::max(width, line.text.size());
  }
  std::string out;
  for (const auto& line : lines) {
    out += line.text;
    if (origins && !line.origin.empty()) {
      if (line.text.size() < width) out.append(width - line.text.size(), ' ');
      out += "  # " + one_line(line.origin);
    }
    out += '\n';
  }
  return out;
}

}  // namespace shoal
