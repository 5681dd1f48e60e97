// Speed of tokenizer training, encoding and batch loading. The text is made here, or is the file or folder
// named by the environment variable SHOAL_BENCH_TEXT.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/base/random.h"
#include "data/batch_loader.h"
#include "data/bpe_trainer.h"
#include "data/text_source.h"

namespace shoal {
namespace {

constexpr size_t kTextBytes = 8 << 20;

/// Words of a made-up language with a natural frequency distribution (rank r about 1 / r).
std::string made_text() {
  const RandomStream random(1, "bench");
  std::string text;
  for (uint64_t i = 0; text.size() < kTextBytes; i++) {
    const auto rank = static_cast<uint64_t>(std::pow(50000.0, random.uniform(2 * i)));
    const uint64_t letters = 1 + random.below(rank << 20, 9);
    for (uint64_t c = 0; c < letters; c++)
      text += static_cast<char>('a' + random.below((rank << 20) + 1 + c, 26));
    const uint64_t mark = random.below(2 * i + 1, 30);
    text += mark == 0 ? ".\n" : mark == 1 ? ", " : mark == 2 ? " 1994 " : " ";
  }
  return text;
}

const std::string& text() {
  static const std::string content = [] {
    const char* path = std::getenv("SHOAL_BENCH_TEXT");
    if (path == nullptr) return made_text();
    std::string all;
    for (const auto& file : list_text_files({path}, {".txt", ".md", ".rst"})) {
      for_each_document(file, DocumentMode::file, "",
                        [&](std::string_view document, int64_t) { all += document; });
    }
    return all;
  }();
  return content;
}

std::unique_ptr<Tokenizer> trained(const std::string& regex) {
  BpeOptions options;
  options.regex = regex;
  BpeTrainer trainer(options);
  const std::string_view view = text();
  trainer.add({&view, 1});
  return trainer.train().tokenizer;
}

void set_bytes(benchmark::State& state) {
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(text().size()));
}

void BM_TrainBpe(benchmark::State& state, const std::string& regex) {
  for (auto _ : state) benchmark::DoNotOptimize(trained(regex));
  set_bytes(state);
}
BENCHMARK_CAPTURE(BM_TrainBpe, gpt2, "gpt2")->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_TrainBpe, llama3, "llama3")->Unit(benchmark::kMillisecond);

void BM_EncodeBpe(benchmark::State& state, const std::string& regex) {
  const auto tokenizer = trained(regex);
  std::vector<int32_t> ids;
  for (auto _ : state) {
    ids.clear();
    tokenizer->encode(text(), ids);
  }
  set_bytes(state);
  state.counters["bytes/token"] = static_cast<double>(text().size()) / static_cast<double>(ids.size());
}
BENCHMARK_CAPTURE(BM_EncodeBpe, gpt2, "gpt2")->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_EncodeBpe, llama3, "llama3")->Unit(benchmark::kMillisecond);

void BM_LoadBatch(benchmark::State& state, bool mask_documents) {
  const auto folder = std::filesystem::temp_directory_path() / str("shoal_data_bench_", ::getpid());
  std::filesystem::create_directories(folder);
  const std::string prefix = (folder / "t").string();
  IndexedDatasetWriter writer(prefix, 50000);
  std::vector<int32_t> document(300, 7);
  for (int64_t d = 0; d < 100'000; d++) {
    writer.add_tokens(document);
    writer.end_document();
  }
  writer.finish();
  const auto source = std::make_shared<const IndexedDataset>(prefix);
  LoaderOptions options;
  options.mask_documents = mask_documents;
  const auto data = std::make_shared<const TokenDataset>(source, SplitOptions{}, Split::train);
  const BatchLoader loader(options, {{data, 1}}, 2048, 50000);
  Batch batch;
  int64_t sample = 0;
  for (auto _ : state) {
    loader.fill(sample, 8, batch);
    sample += 8;
  }
  state.SetItemsProcessed(state.iterations() * 8 * 2048);  // tokens
  std::filesystem::remove_all(folder);
}
BENCHMARK_CAPTURE(BM_LoadBatch, packed, false)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(BM_LoadBatch, masked, true)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace shoal
