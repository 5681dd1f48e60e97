// Hash routing (Roller et al., arXiv:2106.04426): the experts of a token follow from its id alone, through a
// fixed random table. Nothing is learnt, nothing needs balancing; a baseline that learned routers must beat.
#include "core/base/random.h"
#include "models/moe/router.h"

namespace shoal {

namespace {

struct HashOptions final : RouterOptions {
  int64_t seed = 0;
  int64_t num_params(int64_t, int64_t) const override { return 0; }
  void fields(FieldVisitor& v) override {
    v("seed", seed, "of the fixed assignment of token ids to experts", at_least(0));
  }
};

class HashRouter final : public Router {
 public:
  HashRouter(const HashOptions& options, const RouterContext& context)
      : seed_(static_cast<uint64_t>(options.seed) ^ stream_id(context.build.prefix)), context_(context) {}

  RouterGathers gathers() const override { return {false, true, context_.top_k, false}; }

  Routing route(const RouteInput& input) override {
    const int64_t T = input.num_tokens(), K = context_.top_k, E = context_.num_experts;
    // Waits for the device: a baseline, whose hash the host computes.
    const std::vector<int32_t> tokens = input.all_token_ids().to_vector<int32_t>();
    const std::vector<uint8_t> valid =
        input.batch.valid_BS.defined() ? input.batch.valid_BS.to_vector<uint8_t>() : std::vector<uint8_t>{};
    std::vector<int32_t> ids(static_cast<size_t>(T * K), -1);
    std::vector<int64_t> counts(static_cast<size_t>(E), 0);
    for (int64_t t = 0; t < T; t++) {
      if (!valid.empty() && valid[static_cast<size_t>(t)] == 0) continue;
      const auto token = static_cast<uint64_t>(tokens[static_cast<size_t>(t)]);
      for (int64_t k = 0; k < K; k++) {
        // The k-th element of a permutation of the experts: the choices of a token differ.
        const uint64_t expert =
            permute_index(static_cast<uint64_t>(k), static_cast<uint64_t>(E), seed_, token);
        ids[static_cast<size_t>(t * K + k)] = static_cast<int32_t>(expert);
        counts[expert]++;
      }
    }
    Routing routing;
    const Device device = input.x_TD.device();
    routing.expert_ids_TK = Tensor::from(ids, Shape{T, K}, device);
    routing.weights_TK = dispatch_float(input.x_TD.dtype(), "hash router", [&]<class W>() {
      std::vector<W> weights(ids.size());
      for (size_t i = 0; i < ids.size(); i++) weights[i] = ids[i] < 0 ? W(0) : W(1) / static_cast<W>(K);
      return Tensor::from(weights, Shape{T, K}, device);
    });
    routing.counts_E = Tensor::from(counts, Shape{E}, device);
    return routing;
  }

 private:
  uint64_t seed_;  // differs from layer to layer
  RouterContext context_;
};

const bool registered = RouterRegistry::add<HashOptions>(
    "hash", "experts by a fixed hash of the token id (arXiv:2106.04426)",
    [](const HashOptions& o, const RouterContext& c) { return std::make_unique<HashRouter>(o, c); });

}  // namespace

}  // namespace shoal
