// The tokenizer files: our byte and char files, and Hugging Face's tokenizer.json for byte-level BPE. Files
// come from strangers: every size, id and reference is checked before use.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include <nlohmann/json.hpp>

#include "data/bpe_tokenizer.h"

namespace shoal {

inline constexpr int64_t kMaxTokenizerFileBytes = int64_t{256} << 20;

/// Recognises the kind of file. `file` is the name used in errors. UsageError when it is malformed or
/// unsupported.
std::unique_ptr<Tokenizer> tokenizer_from_json(const std::string& text, const std::string& file);

/// Parses JSON with at most 32 levels and without duplicate keys. UsageError otherwise.
nlohmann::json parse_strict_json(const std::string& text, const std::string& file);

/// A tokenizer.json that Hugging Face's library loads.
std::string bpe_to_json(const BpeModel& model);
/// Reads a tokenizer.json; `json` is the parsed `text`. Accepts: no normalizer, no truncation, no padding;
/// ByteLevel or Split + ByteLevel pre-tokenizer with the gpt2 or llama3 regex; ByteLevel or a template with
/// one leading special token as post-processor; BPE model over all 256 bytes with merges as pairs or as "a b"
/// strings.
BpeModel bpe_from_json(const nlohmann::json& json, const std::string& text, const std::string& file);

/// Byte-level alphabet: bytes in the order of the printable characters that stand for them (33-126, 161-172
/// and 174-255 stand for themselves, the other 68 are U+0100 and following).
std::array<uint8_t, 256> bytes_in_character_order();

}  // namespace shoal
