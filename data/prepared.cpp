// What a prepared folder says about itself, and whether its files are the ones it speaks of.
#include <cstdio>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "core/base/text.h"
#include "data/content_hash.h"
#include "data/file_io.h"
#include "data/indexed_dataset.h"
#include "data/prepare.h"

namespace shoal {

namespace fs = std::filesystem;
using nlohmann::json;

std::string PrepareReport::text() const {
  std::string out;
  if (!note.empty()) out += note + "\n";
  out += str(up_to_date ? "already prepared: " : "prepared   ", files, files == 1 ? " file, " : " files, ",
             documents, documents == 1 ? " document" : " documents");
  if (empty_documents > 0) out += str(" (", empty_documents, " empty ones skipped)");
  out += str(", ", human_bytes(text_bytes), " of text");
  if (!up_to_date && encode_seconds > 0) {
    const double speed = static_cast<double>(text_bytes) / encode_seconds;
    out += str(", ", human_bytes(static_cast<int64_t>(speed)), "/s");
  }
  char ratio[64];
  std::snprintf(ratio, sizeof ratio, "%.2f bytes each", bytes_per_token());
  out += str("\n           ", human_count(static_cast<double>(tokens)), " tokens of ", ratio, ", vocabulary ",
             vocab_size);
  return out;
}

void check_prepared(const std::string& folder, const IndexedDataset& dataset, const Tokenizer& tokenizer) {
  const auto report = read_prepared(folder);
  if (!report) return;
  const std::string prefix = indexed_dataset_prefix(folder);
  const auto refuse = [&](const std::string& what) {
    throw UsageError(str("dataset ", folder, ": ", what, "; prepare the data again"));
  };
  if (dataset.num_tokens() != report->tokens)
    refuse(str(prefix, ".bin: dataset.json says ", report->tokens, " tokens, got ", dataset.num_tokens()));
  if (const std::string found = hex_of(dataset.fingerprint());
      !report->fingerprint.empty() && found != report->fingerprint)
    refuse(str(prefix, ".bin or .idx is not the file that was prepared: dataset.json says fingerprint ",
               report->fingerprint, ", got ", found));
  if (tokenizer.vocab_size() != report->vocab_size)
    refuse(str("tokenizer.json: dataset.json says ", report->vocab_size, " tokens, got ",
               tokenizer.vocab_size()));
  if (!report->tokenizer_hash.empty() && hash_text(tokenizer.to_json()) != report->tokenizer_hash)
    refuse("tokenizer.json is not the one that the text was encoded with");
}

std::optional<PrepareReport> read_prepared(const std::string& folder) {
  const std::string path = (fs::path(folder) / "dataset.json").string();
  if (!fs::exists(path)) return std::nullopt;
  try {
    const json saved = json::parse(read_file(path, kMaxDescriptionBytes));
    if (saved.at("format") != kDatasetFormat || saved.at("version") != 1)
      throw UsageError("unknown format or version");
    PrepareReport report;
    report.files = saved.at("files").get<int64_t>();
    report.documents = saved.at("documents").get<int64_t>();
    report.empty_documents = saved.at("empty_documents").get<int64_t>();
    report.tokens = saved.at("tokens").get<int64_t>();
    report.text_bytes = saved.at("text_bytes").get<int64_t>();
    report.vocab_size = saved.at("vocab_size").get<int64_t>();
    report.encode_seconds = saved.at("encode_seconds").get<double>();
    report.note = saved.at("note").get<std::string>();
    report.fingerprint = saved.value("fingerprint", "");
    report.tokenizer_hash = saved.value("tokenizer", "");
    return report;
  } catch (const std::exception& e) {
    throw UsageError(str(path, ": not a dataset description: ", e.what(), "; prepare the data again"));
  }
}

}  // namespace shoal
