// Inside of the config reader: one YAML text to a tree, and one tree on top of another. Callers outside
// core/base use load_yaml_file, load_yaml_text and apply_override of config.h.
#pragma once

#include <string>

#include "core/base/config.h"

namespace shoal {

constexpr size_t kMaxYamlBytes = size_t{1} << 20;
constexpr size_t kMaxYamlDepth = 64;

/// One YAML document as a tree, with ${env:...} expanded; `extends` is left alone. Null when the text is
/// empty or broken; problems go to `errors`. Without `positions` every origin is just `source`.
ConfigNode parse_yaml(const std::string& text, const std::string& source, bool positions,
                      const std::string& path, ConfigErrors& errors);

/// Puts `over` on top of `base`: maps key by key, lists and scalars replaced, an empty section changes
/// nothing. A map whose `kind` differs replaces the whole map, since the options belong to the other kind.
/// `router: x` and `router: {kind: x}` are the same.
void merge_config(ConfigNode& base, ConfigNode over);

/// Turns the short form `router: top_k` into the map `{kind: top_k}`.
void expand_shorthand(ConfigNode& scalar);

}  // namespace shoal
