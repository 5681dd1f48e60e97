// Memory of a training before any of it is allocated: an estimate per rank from the config alone, and what
// this machine has left. Used by the trainer, which refuses what cannot fit, and by `shoal config`.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>

#include "launch/train_config.h"
#include "parallel/bootstrap.h"
#include "parallel/communicator.h"

namespace shoal {

/// Bytes of one rank; doubles, because they may not fit an int64.
struct MemoryEstimate {
  double weights = 0, gradients = 0, optimizer = 0;
  double activations = 0;     // of one micro-batch, when backward begins
  double work = 0;            // of backward and the LM head, on top of these
  double packed_weights = 0;  // bf16 copies
  double total() const { return weights + gradients + optimizer + activations + work + packed_weights; }
  std::string total_text() const;            // "1.20 GiB"
  std::array<std::string, 3> parts() const;  // "weights 100 MiB", "gradients ...", ... for lines
  std::string text() const;                  // "1.20 GiB (weights 100 MiB, ...)"
};

/// Of the largest rank, with experts evenly used. Communication buffers, the data and the program itself
/// (some 100 MiB) are left out: what the estimate says not to fit does not fit.
MemoryEstimate estimate_memory(const TrainConfig& config, const ParallelLayout& layout, int64_t vocab_size);

inline constexpr const char* kUnknownVocab =
    "the data that its tokenizer learns from is not prepared; set model.vocab_size, or prepare it (`shoal "
    "prepare`)";

struct ExpectedVocab {
  int64_t size = 256;  // low
  bool known = false;
};
/// model.vocab_size, or the tokenizer's: of data.sources, of a given file, or what is asked for. With
/// `prepared` also that of data that is prepared already, which no rank may be preparing meanwhile.
ExpectedVocab expected_vocab(const TrainConfig& config, bool prepared);

/// Bytes that this process and its like can still get: MemAvailable, the limits of its control groups (v1 and
/// v2; page cache counts as free). Infinity where the system does not tell. `root` is there for tests.
double available_memory(const std::filesystem::path& root = "/");

/// What a rank may take of the memory that tensors on `device` lie in: its share of the host's, or, on
/// another device, of that of its own among the ranks that have the same one. Ranks that are threads
/// (!info.mpi) all do.
double available_to_rank(Device device, const LaunchInfo& info, int world_size);

/// UsageError with the breakdown and the keys to lower when the estimate exceeds `available`, the bytes that
/// one rank may take.
void check_memory(const LoadedConfig& loaded, const MemoryEstimate& estimate, double available);

/// The same with what each rank may take where run.device puts tensors, as it is now; the least share decides
/// for all. Collective.
void require_memory(const LoadedConfig& loaded, const MemoryEstimate& estimate, Communicator& world);
/// Of a training, with the vocabulary that is expected. Collective.
void require_memory(const LoadedConfig& loaded, Communicator& world);

}  // namespace shoal
