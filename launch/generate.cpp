#include "launch/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/random.h"

namespace shoal {

int32_t sample_token(const std::vector<double>& logits, const SamplingOptions& options, int64_t position) {
  SHOAL_CHECK(!logits.empty(), "sample_token: expected at least one logit");
  // Most likely first; NaN never wins.
  auto key = [&](int32_t i) {
    return std::isnan(logits[static_cast<size_t>(i)]) ? -HUGE_VAL : logits[static_cast<size_t>(i)];
  };
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const size_t wanted =
      options.top_k > 0 ? std::min<size_t>(order.size(), static_cast<size_t>(options.top_k)) : order.size();
  std::partial_sort(order.begin(), order.begin() + static_cast<ptrdiff_t>(wanted), order.end(),
                    [&](int32_t a, int32_t b) {
                      const double x = key(a), y = key(b);
                      return x != y ? x > y : a < b;
                    });
  order.resize(wanted);
  if (options.temperature <= 0) return order.front();

  std::vector<double> weights(order.size());
  const double largest = key(order.front());
  double total = 0;
  for (size_t i = 0; i < order.size(); i++) {
    weights[i] = std::exp((key(order[i]) - largest) / options.temperature);
    total += weights[i];
  }
  double kept = 0;
  size_t count = 0;
  while (count < order.size() && (count == 0 || kept < options.top_p * total)) kept += weights[count++];

  const double draw = RandomStream(options.seed, "sample").uniform(static_cast<uint64_t>(position)) * kept;
  double sum = 0;
  for (size_t i = 0; i < count; i++) {
    sum += weights[i];
    if (draw < sum) return order[i];
  }
  return order[count - 1];
}

void check_prompt(const Model& model, const std::vector<int32_t>& prompt) {
  if (prompt.empty()) throw UsageError("generate: expected a prompt of at least one token, got none");
  const auto length = static_cast<int64_t>(prompt.size());
  const int64_t limit = model.max_positions();
  if (limit > 0 && length > limit) {
    throw UsageError(
        str("generate: expected a prompt of at most ", limit, " tokens (learned positions), got ", length));
  }
}

std::vector<int32_t> generate(Model& model, const std::vector<int32_t>& prompt,
                              const GenerateOptions& options, const std::function<void(int32_t)>& on_token) {
  check_prompt(model, prompt);
  const auto length = static_cast<int64_t>(prompt.size());
  const int64_t limit = model.max_positions();
  int64_t wanted = options.max_tokens;
  if (limit > 0) wanted = std::min(wanted, limit - length + 1);
  std::vector<int32_t> out;
  if (wanted <= 0) return out;
  DecodeState state = model.make_decode_state(1, length + wanted);
  const Device device = state.keys.empty() ? Device{} : state.keys.front().device();
  Tensor next = Tensor::from(prompt, Shape{length}, device);
  while (static_cast<int64_t>(out.size()) < wanted) {
    const Tensor logits = model.next_logits(next, state).to(Device{});
    std::vector<double> values;
    if (logits.dtype() == DType::f64) {
      values = logits.to_vector<double>();
    } else {
      const std::vector<float> narrow = logits.to_vector<float>();
      values.assign(narrow.begin(), narrow.end());
    }
    const int32_t token = sample_token(values, options.sampling, state.length);
    if (options.stop_token && token == *options.stop_token) break;
    out.push_back(token);
    if (on_token) on_token(token);
    next = Tensor::from(std::vector<int32_t>{token}, Shape{1}, device);
  }
  return out;
}

}  // namespace shoal
