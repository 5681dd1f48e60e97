#include "core/base/yaml.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <unordered_map>

#include "core/base/config_fields.h"
#include "core/base/config_scalar.h"
#include "core/base/text.h"

namespace shoal {

namespace {

// Ends the reading of one text: what follows the problem has no meaning.
struct Unreadable {
  size_t offset;
  std::string path, problem;
};

// ${env:NAME} and ${env:NAME:-default} replaced, $$ made $. Problem text, or "".
std::string expand_environment(std::string& scalar) {
  if (scalar.find('$') == scalar.npos) return "";
  std::string out;
  for (size_t at = 0; at < scalar.size(); at++) {
    const std::string_view rest = std::string_view(scalar).substr(at);
    if (!rest.starts_with("$$") && !rest.starts_with("${")) {
      out += scalar[at];
      continue;
    }
    if (rest[1] == '$') {
      out += '$';
      at++;
      continue;
    }
    const size_t end = rest.find('}');
    if (end == rest.npos) return "'${' without '}'; write $${ for a literal ${";
    const std::string body(rest.substr(2, end - 2));
    if (!body.starts_with("env:")) {
      return str("expected ${env:NAME} or ${env:NAME:-default}, got '${", shown(body),
                 "}'; write $${ for a literal ${");
    }
    const size_t split = body.find(":-", 4);
    const std::string name = body.substr(4, split == body.npos ? body.npos : split - 4);
    if (name.empty()) return "${env:} names no environment variable";
    const char* value = std::getenv(name.c_str());
    if (split != body.npos && (!value || !*value)) {
      out += body.substr(split + 2);
    } else if (value) {
      std::string what;
      if (find_bad_byte(value, what) != std::string::npos)
        return str(what, " in environment variable ", shown(name));
      out += value;
    } else {
      return str("environment variable ", shown(name), " is not set; set it or write ${env:", shown(name),
                 ":-default}");
    }
    at += end;
  }
  scalar = std::move(out);
  return "";
}

// Builds the tree from the events, where positions, tags, anchors, depth and repeated keys are still seen.
class TreeBuilder final : public YAML::EventHandler {
 public:
  TreeBuilder(const std::string& text, std::string source, bool positions, std::string path,
              ConfigErrors& errors)
      : text_(text),
        source_(std::move(source)),
        positions_(positions),
        path_(std::move(path)),
        errors_(errors) {
    line_starts_.push_back(0);
    for (size_t at = 0; at < text.size(); at++) {
      if (text[at] == '\n') line_starts_.push_back(at + 1);
    }
  }

  ConfigNode root;

  Origin origin(size_t offset) const {
    if (!positions_) return Origin{source_, 0, 0};
    offset = std::min(offset, text_.size());
    const auto next = std::upper_bound(line_starts_.begin(), line_starts_.end(), offset);
    // Events come in text order: counting goes on where it stopped, so that one long line costs linear time.
    if (offset < counted_to_ || *(next - 1) > counted_to_) {
      counted_to_ = *(next - 1);
      column_ = 1;
    }
    for (; counted_to_ < offset; counted_to_++) {
      if ((static_cast<unsigned char>(text_[counted_to_]) & 0xC0) != 0x80) column_++;
    }
    return Origin{source_, static_cast<int>(next - line_starts_.begin()), column_};
  }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (documents_++ == 0) return;
    const bool marked = std::string_view(text_).substr(offset_of(mark)).starts_with("---");
    throw Unreadable{offset_of(mark), path_,
                     marked ? "expected one YAML document, got a second one ('---'); put it in its own file"
                            : "not valid YAML: text after the end of the document"};
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    check_plain(mark, "", anchor);
    ConfigNode node;
    node.origin = origin(offset_of(mark));
    attach(std::move(node), offset_of(mark));
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    if (!merge_key())
      errors_.add(here(), origin(offset_of(mark)), "aliases (*name) are not supported; write the value out");
    ConfigNode node;
    node.refused = true;
    node.origin = origin(offset_of(mark));
    attach(std::move(node), offset_of(mark));
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    check_plain(mark, tag, anchor);
    check_closed(offset_of(mark));
    ConfigNode node;
    node.kind = ConfigNode::Kind::scalar;
    node.scalar = value;
    node.quoted = tag == "!";
    node.origin = origin(offset_of(mark));
    attach(std::move(node), offset_of(mark));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, ConfigNode::Kind::list);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, ConfigNode::Kind::map);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Frame {
    ConfigNode node;
    size_t offset = 0;
    bool have_key = false, repeated = false;
    std::string key;
    Origin key_origin;
    std::unordered_map<std::string, size_t> places;  // key -> index of its entry
  };

  static size_t offset_of(const YAML::Mark& mark) { return mark.pos > 0 ? static_cast<size_t>(mark.pos) : 0; }

  // Dotted path of the value that comes next.
  std::string here() const {
    std::string path = path_;
    for (const auto& frame : frames_) {
      const bool list = frame.node.kind == ConfigNode::Kind::list;
      if (list) path = join_path(path, std::to_string(frame.node.items.size()));
      if (!list && frame.have_key) path = join_path(path, shown(frame.key));
    }
    return path;
  }

  void check_plain(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    const size_t offset = offset_of(mark);
    if (anchor != 0)
      errors_.add(here(), origin(offset), "anchors (&name) are not supported; write the value out");
    const bool written = offset < text_.size() && text_[offset] == '!';
    if (written || (!tag.empty() && tag != "?" && tag != "!")) {
      errors_.add(here(), origin(offset), "tags (!name) are not supported; the key decides the type");
    }
  }

  // yaml-cpp takes the end of the text for the closing quote.
  void check_closed(size_t offset) const {
    if (offset >= text_.size() || (text_[offset] != '"' && text_[offset] != '\'')) return;
    const char quote = text_[offset];
    for (size_t at = offset + 1; at < text_.size(); at++) {
      if (text_[at] == '\\' && quote == '"') {
        at++;
      } else if (text_[at] == quote) {
        if (quote == '"' || at + 1 >= text_.size() || text_[at + 1] != quote) return;
        at++;  // '' inside single quotes
      }
    }
    throw Unreadable{offset, here(), "not valid YAML: the quote that opens here is never closed"};
  }

  void open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, ConfigNode::Kind kind) {
    check_plain(mark, tag, anchor);
    if (awaits_key())
      throw Unreadable{offset_of(mark), here(),
                       "expected a plain key, got a list or map as a key; is a ] or } missing?"};
    if (frames_.size() >= kMaxYamlDepth) {
      throw Unreadable{offset_of(mark), path_, str("nested deeper than ", kMaxYamlDepth, " levels")};
    }
    Frame& frame = frames_.emplace_back();
    frame.offset = offset_of(mark);
    frame.node.kind = kind;
    frame.node.origin = origin(frame.offset);
  }
  void close() {
    Frame frame = std::move(frames_.back());
    frames_.pop_back();
    attach(std::move(frame.node), frame.offset);
  }

  bool merge_key() const { return !frames_.empty() && frames_.back().have_key && frames_.back().key == "<<"; }
  bool awaits_key() const {
    return !frames_.empty() && frames_.back().node.kind == ConfigNode::Kind::map && !frames_.back().have_key;
  }

  void attach(ConfigNode node, size_t offset) {
    if (awaits_key()) return attach_key(std::move(node), offset);
    if (node.kind == ConfigNode::Kind::scalar) expand(node);
    if (frames_.empty()) {
      root = std::move(node);
      return;
    }
    Frame& top = frames_.back();
    if (top.node.kind == ConfigNode::Kind::list) {
      top.node.items.push_back(std::move(node));
      return;
    }
    if (!top.repeated) top.node.entries.push_back({std::move(top.key), top.key_origin, std::move(node)});
    top.have_key = false;
  }

  void attach_key(ConfigNode key, size_t offset) {
    if (key.kind != ConfigNode::Kind::scalar || key.scalar.empty()) {
      throw Unreadable{offset, here(), "expected a plain key, got an empty one"};
    }
    Frame& top = frames_.back();
    const auto [place, fresh] = top.places.emplace(key.scalar, top.node.entries.size());
    top.have_key = true;
    top.repeated = !fresh;
    top.key = std::move(key.scalar);
    top.key_origin = key.origin;
    if (top.key == "<<" && !key.quoted) {
      errors_.add(here(), top.key_origin,
                  "merge keys (<<) are not supported; write the keys out, or put them in a file and use "
                  "extends");
      top.repeated = true;
      return;
    }
    if (!fresh) {
      const Origin& first = top.node.entries[place->second].key_origin;
      const std::string where = positions_ ? str("; first at ", first.text()) : "";
      errors_.add(here(), top.key_origin, str("duplicate key", where));
    }
  }

  void expand(ConfigNode& node) {
    const std::string before = node.scalar;
    std::string problem = expand_environment(node.scalar);
    if (problem.empty() && node.scalar.find('\0') != std::string::npos) problem = "NUL byte in a value";
    if (!problem.empty()) {
      errors_.add(here(), node.origin, problem);
      node.refused = true;
    }
    if (node.quoted || node.scalar == before) return;
    // An empty variable is an empty string; one that says null is null.
    if (node.scalar.empty()) {
      node.quoted = true;
    } else if (scalar_type(node.scalar) == ScalarType::null) {
      node.kind = ConfigNode::Kind::null;
    }
  }

  const std::string& text_;
  std::string source_;
  bool positions_;
  std::string path_;
  ConfigErrors& errors_;
  std::vector<size_t> line_starts_;
  mutable size_t counted_to_ = 0;
  mutable int column_ = 1;  // at counted_to_
  std::vector<Frame> frames_;
  int documents_ = 0;
};

// What usually stands behind a syntax error on this line, or "".
const char* syntax_hint(const std::string& text, size_t offset) {
  offset = std::min(offset, text.size());
  const size_t before = text.rfind('\n', offset == 0 ? 0 : offset - 1);
  const size_t start = before == text.npos || offset == 0 ? 0 : before + 1;
  const std::string_view line = std::string_view(text).substr(start, text.find('\n', start) - start);
  if (line.find_first_not_of(" \t") > line.find('\t')) return "; indent with spaces, not tabs";
  if (line.find("${") != line.npos) return "; put quotes around ${...} inside [ ] and { }";
  return "";
}

// A file with everything it extends.
class FileLoader {
 public:
  explicit FileLoader(ConfigErrors& errors) : errors_(errors) {}

  ConfigNode load_file(const std::string& path, const Origin* extended_at) {
    const auto fail = [&](const std::string& problem) {
      errors_.add(extended_at ? "extends" : "", extended_at ? *extended_at : Origin{path, 0, 0}, problem);
      return ConfigNode{};
    };
    std::error_code error;
    const std::string about = extended_at ? str("file '", path, "': ") : "";
    if (!std::filesystem::exists(path, error)) return fail(about + "no such file");
    if (std::filesystem::is_directory(path, error))
      return fail(about + "expected a YAML file, got a directory");
    const std::string id = std::filesystem::weakly_canonical(path, error).string();
    if (std::find(open_.begin(), open_.end(), id) != open_.end()) {
      return fail(str("extends goes round in a circle: ", join(names_, " -> "), " -> ", path));
    }
    if (++num_files_ > kMaxFiles) return fail(str("more than ", kMaxFiles, " files in a chain of extends"));
    std::ifstream in(path, std::ios::binary);
    std::string text(kMaxYamlBytes + 1, '\0');
    in.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<size_t>(in.gcount()));
    if (!in.is_open() || in.bad()) return fail(about + "cannot be read; check its permissions");
    open_.push_back(id);
    names_.push_back(path);
    ConfigNode out = load_text(text, path);
    open_.pop_back();
    names_.pop_back();
    return out;
  }

  ConfigNode load_text(const std::string& text, const std::string& source) {
    ConfigNode root = parse_yaml(text, source, true, "", errors_);
    if (root.kind == ConfigNode::Kind::null) root.kind = ConfigNode::Kind::map;
    if (root.kind != ConfigNode::Kind::map) {
      const bool glued = root.kind == ConfigNode::Kind::scalar && root.scalar.find(':') != std::string::npos;
      errors_.add("", root.origin,
                  str("expected 'key: value' lines, got ", describe_value(root),
                      glued ? "; put a space after ':'" : ""));
      root = ConfigNode{};
      root.kind = ConfigNode::Kind::map;
      root.origin = Origin{source, 1, 1};
    }
    const auto entry = std::find_if(root.entries.begin(), root.entries.end(),
                                    [](const ConfigNode::Entry& e) { return e.key == "extends"; });
    if (entry == root.entries.end()) return root;
    const ConfigNode extends = std::move(entry->value);
    root.entries.erase(entry);
    ConfigNode base;
    for (const auto& parent : extends.kind == ConfigNode::Kind::list ? extends.items : std::vector{extends}) {
      if (parent.refused) continue;
      if (parent.kind != ConfigNode::Kind::scalar || parent.scalar.empty()) {
        errors_.add("extends", parent.origin,
                    "expected a file name or a list of them, got " + describe_value(parent));
        continue;
      }
      const auto path = (std::filesystem::path(source).parent_path() / parent.scalar).lexically_normal();
      merge_config(base, load_file(path.string(), &parent.origin));
    }
    if (base.kind == ConfigNode::Kind::null) return root;
    merge_config(base, std::move(root));
    return base;
  }

 private:
  static constexpr int kMaxFiles = 64;
  ConfigErrors& errors_;
  std::vector<std::string> open_, names_;  // canonical paths, and as written
  int num_files_ = 0;
};

}  // namespace

ConfigNode parse_yaml(const std::string& full_text, const std::string& source, bool positions,
                      const std::string& path, ConfigErrors& errors) {
  const std::string text = full_text.substr(full_text.starts_with("\xEF\xBB\xBF") ? 3 : 0);
  TreeBuilder builder(text, source, positions, path, errors);
  const auto fail = [&](size_t offset, const std::string& where, const std::string& problem) {
    errors.add(where, builder.origin(offset), problem);
    ConfigNode empty;
    empty.origin = builder.origin(0);
    return empty;
  };
  if (text.size() > kMaxYamlBytes)
    return fail(kMaxYamlBytes, path, "larger than 1 MiB; a config is a small file");
  std::string what;
  if (const size_t bad = find_bad_byte(text, what); bad != text.npos) {
    return fail(bad, path, str(what, "; expected UTF-8 text"));
  }
  builder.root.origin = builder.origin(0);
  try {
    std::istringstream in(text);
    YAML::Parser parser(in);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const Unreadable& problem) {
    return fail(problem.offset, problem.path, problem.problem);
  } catch (const YAML::Exception& e) {
    const size_t offset = e.mark.pos > 0 ? static_cast<size_t>(e.mark.pos) : 0;
    return fail(offset, path, str("not valid YAML: ", e.msg, syntax_hint(text, offset)));
  }
  return std::move(builder.root);
}

ConfigNode load_yaml_file(const std::string& path, ConfigErrors& errors) {
  ConfigNode root = FileLoader(errors).load_file(path, nullptr);
  root.kind = ConfigNode::Kind::map;
  if (root.origin.line == 0) root.origin = Origin{path, 1, 1};
  return root;
}

ConfigNode load_yaml_text(const std::string& text, const std::string& source, ConfigErrors& errors) {
  return FileLoader(errors).load_text(text, source);
}

}  // namespace shoal
