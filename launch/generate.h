// Sampling text from a model.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "models/model.h"

namespace shoal {

struct SamplingOptions {
  double temperature = 1;  // 0: always the most likely token
  int64_t top_k = 0;       // only the k most likely tokens; 0: all
  double top_p = 1;        // the smallest set of most likely tokens whose probability reaches p
  uint64_t seed = 1;
};

/// Picks a token from logits [V] of sequence position `position`. Order of work: temperature, top-k, top-p,
/// draw. Ties go to the smaller id. top-p keeps a token when the probability of all tokens before it (most
/// likely first) is below p, so the one that crosses p is kept and at least one always is. The draw depends
/// only on (seed, position).
int32_t sample_token(const std::vector<double>& logits, const SamplingOptions& options, int64_t position);

struct GenerateOptions {
  SamplingOptions sampling;
  int64_t max_tokens = 200;
  std::optional<int32_t> stop_token;
};

/// UsageError unless the model can take the prompt.
void check_prompt(const Model& model, const std::vector<int32_t>& prompt);

/// Continues `prompt` (not empty). Calls `on_token` for each new id, and returns all new ids (without the
/// stop token). Collective over the model's ep group: every rank gets the same result.
std::vector<int32_t> generate(Model& model, const std::vector<int32_t>& prompt,
                              const GenerateOptions& options,
                              const std::function<void(int32_t)>& on_token = {});

}  // namespace shoal
