#include "data/prepare.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <mutex>

#include <nlohmann/json.hpp>

#include "core/base/text.h"
#include "core/base/threads.h"
#include "data/content_hash.h"
#include "data/file_io.h"
#include "data/indexed_dataset.h"
#include "data/text_source.h"
#include "data/tokenizer_json.h"

namespace shoal {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr size_t kPieceBytes = size_t{1} << 18;  // a task for one thread
constexpr int64_t kSampledBlocks = 1024;         // of all text files together, at least one of each

std::string options_text(PrepareOptions options) {
  return print_fields([&options](FieldVisitor& v) { options.fields(v); });
}

/// Part of a document; documents longer than kPieceBytes are cut between words so that threads can share
/// them.
struct Piece {
  size_t begin, size;  // into the batch's text
  bool first, last;    // of its document
  const std::string* file;
};

// The place after `wanted` bytes, or the next one, between an ASCII letter and an ASCII space or newline.
size_t cut_between_words(std::string_view text, size_t wanted) {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  for (size_t i = wanted; i < text.size(); i++) {
    if ((text[i] == ' ' || text[i] == '\n') && is_letter(text[i - 1])) return i;
  }
  return text.size();
}

void remove_file(const std::string& path) {
  std::error_code error;
  fs::remove(path, error);
  if (error) throw Error(str("prepare: cannot remove ", path, ": ", error.message()));
}

/// Collects pieces of documents and hands them over in batches large enough to share among the threads.
class Batcher {
 public:
  using Consume = std::function<void(const std::string& text, const std::vector<Piece>& pieces)>;
  using Progress = std::function<void(int64_t read_bytes)>;  // of the current file; called after each batch

  Batcher(bool cut, Consume consume, Progress progress)
      : cut_(cut), consume_(std::move(consume)), progress_(std::move(progress)) {}

  /// The file has been read up to end_offset when the document ends.
  void add(std::string_view document, const std::string& file, int64_t end_offset) {
    for (bool first = true; !document.empty(); first = false) {
      const bool cut = cut_ && document.size() > kPieceBytes;
      const size_t size = cut ? cut_between_words(document, kPieceBytes) : document.size();
      pieces_.push_back({text_.size(), size, first, size == document.size(), &file});
      text_ += document.substr(0, size);
      document.remove_prefix(size);
      if (text_.size() < batch_bytes_) continue;
      flush();
      progress_(std::max<int64_t>(0, end_offset - static_cast<int64_t>(document.size())));
    }
  }
  void flush() {
    if (!pieces_.empty()) consume_(text_, pieces_);
    text_.clear();
    pieces_.clear();
  }

 private:
  bool cut_;
  Consume consume_;
  Progress progress_;
  size_t batch_bytes_ = 4 * kPieceBytes * static_cast<size_t>(std::max(1, num_threads()));
  std::string text_;
  std::vector<Piece> pieces_;
};

class Preparation {
 public:
  Preparation(const PrepareOptions& options, const PrepareProgressFn& progress)
      : options_(options), progress_(progress), folder_(options.output) {
    if (options.output.empty()) throw UsageError("prepare: set output to the folder of the prepared dataset");
    if (options.text.empty()) throw UsageError("prepare: set text to at least one file or folder");
    files_ = list_text_files(options.text, options.extensions);
    for (const auto& file : files_) total_bytes_ += file.size;
    signature_ = signature();
  }

  PrepareReport run() {
    std::unique_ptr<FileLock> lock;
    try {
      std::error_code error;
      fs::create_directories(folder_, error);
      if (error) throw Error(str("prepare: cannot create the folder ", folder_, ": ", error.message()));
      lock = std::make_unique<FileLock>(path_of(".lock"), [&] {
        if (progress_) progress_({"wait for another", 0, total_bytes_});
      });
    } catch (const Error&) {
      // Somebody else's folder, or a read-only disk: a complete dataset there can still be used.
      if (auto report = finished()) return *report;
      throw;
    }
    if (auto report = finished()) return *report;
    report_.replaced = fs::exists(path_of("dataset.json"));
    remove_leftovers();
    make_tokenizer();
    encode();
    save_tokenizer(*tokenizer_, path_of("tokenizer.json"));
    write_report();
    return report_;
  }

 private:
  std::string path_of(const char* name) const { return (fs::path(folder_) / name).string(); }

  std::string signature() const {
    PrepareOptions inputs = options_;
    inputs.output.clear();  // where the result lies does not change it
    std::string text = options_text(inputs);
    const int64_t blocks = std::max<int64_t>(1, kSampledBlocks / static_cast<int64_t>(files_.size()));
    for (const auto& file : files_) {
      text += str(file.path, '\0', file.size, '\0', hex_of(sampled_hash(file.path, blocks)), '\0');
    }
    if (const auto* file = dynamic_cast<const TokenizerFileOptions*>(options_.tokenizer.options.get())) {
      std::error_code ignored;
      const bool folder = fs::is_directory(file->path, ignored);
      if (!folder && !fs::is_regular_file(file->path, ignored))
        throw UsageError(str("tokenizer ", file->path, ": no such file"));
      text += hex_of(content_hash(folder ? file->path + "/tokenizer.json" : file->path));
    }
    return hash_text(text);
  }

  /// The report of an earlier run on the same inputs, if its files are whole.
  std::optional<PrepareReport> finished() const {
    try {
      if (!fs::exists(path_of("dataset.json"))) return std::nullopt;
      ordered_json saved = ordered_json::parse(read_file(path_of("dataset.json"), kMaxDescriptionBytes));
      if (saved.value("signature", "") != signature_ || !same_texts(saved.at("sources"))) return std::nullopt;
      auto report = read_prepared(folder_);
      const IndexedDataset dataset(indexed_dataset_prefix(folder_));
      const auto tokenizer = load_tokenizer(folder_);
      if (!report || tokenizer->vocab_size() != report->vocab_size) return std::nullopt;
      check_prepared(folder_, dataset, *tokenizer);
      report->up_to_date = true;
      if (ordered_json now = sources_json(saved["sources"]); now != saved["sources"]) {
        // Only the times have changed; the next start need not read all of the text again.
        saved["sources"] = std::move(now);
        try {
          write_description(saved);
        } catch (const Error&) {
          // A folder that cannot be written: then all of the text is read again next time.
        }
      }
      return report;
    } catch (const std::exception&) {
      return std::nullopt;  // damaged or of another version: prepare again
    }
  }

  /// Whether every text file is unchanged: by its times and inode, or else by every byte of it. A file of the
  /// same size whose modification time was set back still has another change time or inode.
  bool same_texts(const ordered_json& sources) const {
    if (sources.size() != files_.size()) return false;
    for (size_t i = 0; i < files_.size(); i++) {
      const TextFile& file = files_[i];
      const ordered_json& source = sources[i];
      const bool untouched = source.at("mtime_ns") == file.mtime_ns &&
                             source.at("ctime_ns") == file.ctime_ns && source.at("inode") == file.inode;
      if (!untouched && source.at("hash") != hex_of(content_hash(file.path))) return false;
    }
    return true;
  }

  void remove_leftovers() const {
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (entry.path().filename().string().find(".tmp.") != std::string::npos)
        remove_file(entry.path().string());
    }
  }

  /// Runs all documents of all files through `consume` in batches. `seen` is called for each document.
  void for_each_batch(const char* phase, bool cut, const Batcher::Consume& consume,
                      const std::function<void(std::string_view document)>& seen) const {
    int64_t before = 0;
    const auto progress = [&](int64_t read_bytes) {
      if (progress_) progress_({phase, before + read_bytes, total_bytes_});
    };
    Batcher batcher(cut, consume, progress);
    for (const auto& file : files_) {
      for_each_document(file, document_mode(options_.documents, file.path), options_.text_key,
                        [&](std::string_view document, int64_t end_offset) {
                          seen(document);
                          batcher.add(document, file.path, end_offset);
                        });
      before += file.size;
    }
    batcher.flush();
    progress(0);
  }

  /// Puts the name of the piece's file in front of what `work` complains about.
  template <class Work>
  static void with_file_name(const Piece& piece, const Work& work) {
    try {
      work();
    } catch (const UsageError& error) {
      throw UsageError(str("text ", *piece.file, ": ", error.what()));
    }
  }

  void make_tokenizer() {
    const auto trainer = TokenizerTrainerRegistry::make(options_.tokenizer);
    if (trainer->needs_text()) {
      const auto add = [&](const std::string& text, const std::vector<Piece>& pieces) {
        std::vector<std::string_view> views;
        for (const auto& piece : pieces)
          views.push_back(std::string_view(text).substr(piece.begin, piece.size));
        try {
          trainer->add(views);
        } catch (const UsageError&) {
          for (size_t i = 0; i < views.size(); i++)
            with_file_name(pieces[i], [&] { trainer->add(std::span(views).subspan(i, 1)); });
          throw;
        }
      };
      for_each_batch("train tokenizer", true, add, [](std::string_view) {});
    }
    auto trained = trainer->train();
    tokenizer_ = std::move(trained.tokenizer);
    report_.note = trained.note;
    report_.vocab_size = tokenizer_->vocab_size();
  }

  void encode() {
    const auto start = Clock::now();
    report_.files = static_cast<int64_t>(files_.size());
    IndexedDatasetWriter writer(indexed_dataset_prefix(folder_), tokenizer_->vocab_size());
    const auto consume = [&](const std::string& text, const std::vector<Piece>& pieces) {
      encode_batch(text, pieces, writer);
    };
    for_each_batch("encode", tokenizer_->can_cut_between_words(), consume, [&](std::string_view document) {
      document.empty() ? report_.empty_documents++ : report_.documents++;
      report_.text_bytes += static_cast<int64_t>(document.size());
    });
    if (report_.documents == 0) {
      throw UsageError(str("prepare: the text has no documents: ", report_.files, " files with ",
                           total_bytes_, " bytes, ", report_.empty_documents, " empty documents (",
                           join(options_.text, ", "), "); give text with something in it"));
    }
    report_.encode_seconds = std::chrono::duration<double>(Clock::now() - start).count();
    // Until here an older dataset in the folder was whole; from here on none is, until write_report.
    writer.finish([&] {
      for (const char* name : {"dataset.json", "tokenizer.json", "tokens.idx", "tokens.bin"})
        remove_file(path_of(name));
    });
    report_.tokens = writer.num_tokens();
  }

  void encode_batch(const std::string& text, const std::vector<Piece>& pieces, IndexedDatasetWriter& writer) {
    if (ids_.size() < pieces.size()) ids_.resize(pieces.size());
    std::mutex mutex;
    std::exception_ptr error;
    const auto begin_id = tokenizer_->beginning_of_document(), end_id = tokenizer_->end_of_document();
    parallel_tasks(static_cast<int64_t>(pieces.size()), [&](int64_t task) {
      const Piece& piece = pieces[static_cast<size_t>(task)];
      auto& ids = ids_[static_cast<size_t>(task)];
      ids.clear();
      try {
        if (piece.first && begin_id) ids.push_back(*begin_id);
        const auto part = std::string_view(text).substr(piece.begin, piece.size);
        with_file_name(piece, [&] { tokenizer_->encode(part, ids); });
        if (piece.last && end_id) ids.push_back(*end_id);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    });
    if (error) std::rethrow_exception(error);
    for (size_t i = 0; i < pieces.size(); i++) {
      writer.add_tokens(ids_[i]);
      if (pieces[i].last) writer.end_document();
    }
  }

  /// What is known about the text files; their hashes are taken from `before`, or made when it is empty.
  ordered_json sources_json(const ordered_json& before) const {
    ordered_json sources = ordered_json::array();
    for (size_t i = 0; i < files_.size(); i++) {
      const TextFile& file = files_[i];
      sources.push_back(
          {{"path", file.path},
           {"size", file.size},
           {"mtime_ns", file.mtime_ns},
           {"ctime_ns", file.ctime_ns},
           {"inode", file.inode},
           {"hash", before.empty() ? ordered_json(hex_of(content_hash(file.path))) : before[i].at("hash")}});
    }
    return sources;
  }

  void write_description(const ordered_json& root) const {
    const auto replace = ordered_json::error_handler_t::replace;  // paths need not be UTF-8
    write_file(path_of("dataset.json"), root.dump(2, ' ', false, replace) + "\n");
  }

  void write_report() const {
    const ordered_json root = {
        {"format", kDatasetFormat},
        {"version", 1},
        {"files", report_.files},
        {"documents", report_.documents},
        {"empty_documents", report_.empty_documents},
        {"tokens", report_.tokens},
        {"text_bytes", report_.text_bytes},
        {"vocab_size", report_.vocab_size},
        {"encode_seconds", report_.encode_seconds},
        {"note", report_.note},
        {"signature", signature_},
        {"fingerprint", hex_of(IndexedDataset(indexed_dataset_prefix(folder_)).fingerprint())},
        {"tokenizer", hash_text(tokenizer_->to_json())},
        {"options", options_text(options_)},
        {"sources", sources_json(ordered_json())}};
    write_description(root);
  }

  const PrepareOptions& options_;
  const PrepareProgressFn& progress_;
  std::string folder_, signature_;
  std::vector<TextFile> files_;
  int64_t total_bytes_ = 0;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::vector<std::vector<int32_t>> ids_;  // per piece of the batch
  PrepareReport report_;
};

}  // namespace

PrepareReport prepare_dataset(const PrepareOptions& options, const PrepareProgressFn& progress) {
  return Preparation(options, progress).run();
}

}  // namespace shoal
