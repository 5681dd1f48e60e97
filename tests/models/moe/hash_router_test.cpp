// The hash router: fixed experts per token id, no parameters, layout independence.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "models/moe/router.h"
#include "tests/support/parity.h"
#include "tests/support/tiny_model.h"

namespace shoal::testing {
namespace {

Routing route_tokens(const std::vector<int32_t>& tokens, int64_t experts, int64_t top_k,
                     const std::vector<uint8_t>& valid = {}) {
  RouterContext context;
  context.num_experts = experts;
  context.top_k = top_k;
  context.hidden_size = 4;
  const auto router = RouterRegistry::make({"hash", nullptr}, context);
  EXPECT_TRUE(router->parameters().empty());
  ModelBatch batch = batch_of({tokens});
  if (!valid.empty()) batch.valid_BS = Tensor::from(valid, Shape{std::ssize(valid)});
  const auto world = make_single_communicator();
  const ForwardContext train;
  const Tensor x = Tensor::zeros({std::ssize(tokens), 4}, DType::f32);
  const TokenSplit split(*world, ContextSplit(*world, ContextKind::all_gather));
  return router->route({x, batch, train, *world, {}, split});
}

TEST(HashRouter, EqualTokensGoToEqualDistinctExpertsWithEqualWeights) {
  const Routing r = route_tokens({7, 3, 7, 9, 3}, 8, 3);
  const std::vector<int32_t> ids = r.expert_ids_TK.to_vector<int32_t>();
  for (int t = 0; t < 5; t++) {
    EXPECT_EQ(std::set<int32_t>(ids.begin() + 3 * t, ids.begin() + 3 * t + 3).size(), 3U);
  }
  EXPECT_TRUE(std::equal(ids.begin(), ids.begin() + 3, ids.begin() + 6));
  EXPECT_TRUE(std::equal(ids.begin() + 3, ids.begin() + 6, ids.begin() + 12));
  for (const float w : r.weights_TK.to_vector<float>()) EXPECT_FLOAT_EQ(w, 1.0F / 3);
}

TEST(HashRouter, SpreadsManyTokensEvenlyAndIgnoresPadding) {
  std::vector<int32_t> tokens(4000);
  for (size_t i = 0; i < tokens.size(); i++) tokens[i] = static_cast<int32_t>(i);
  for (const int64_t count : route_tokens(tokens, 8, 2).counts_E.to_vector<int64_t>()) {
    EXPECT_NEAR(static_cast<double>(count), 1000, 120);
  }
  const Routing r = route_tokens({1, 2}, 4, 1, {1, 0});
  EXPECT_EQ(r.expert_ids_TK.to_vector<int32_t>()[1], -1);
  EXPECT_EQ(r.weights_TK.to_vector<float>()[1], 0);
}

TEST(HashRouter, TrainsTheSameOnEveryLayout) {
  auto run = [&](int world, int ep) {
    ParityResult result;
    run_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
      ParityCase mine;
      mine.model = "moe: {num_experts: 8, top_k: 2, hidden: 8, router: hash}";
      mine.ep = ep;
      ParityResult r = run_parity(mine, comm);
      if (comm->rank() == 0) result = std::move(r);
    });
    return result;
  };
  const ParityResult one = run(1, 1);
  EXPECT_TRUE(same_result(run(2, 2), one, 1e-11));
  EXPECT_TRUE(same_result(run(4, 2), one, 1e-11));
}

}  // namespace
}  // namespace shoal::testing
