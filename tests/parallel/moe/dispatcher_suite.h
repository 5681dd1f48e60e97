// Runs a dispatcher with experts that differ, forward and backward, on any group; results as plain tensors.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "core/autograd/tape.h"
#include "core/base/config.h"
#include "core/base/random.h"
#include "core/base/yaml.h"
#include "core/nn/placement.h"
#include "core/ops/elementwise.h"
#include "parallel/moe/dispatcher.h"
#include "tests/support/gradcheck.h"

namespace shoal::testing {

/// A routing of the tokens of all ranks: tokens[r] on rank r, ids(global token, choice).
struct RoutingCase {
  const char* name;
  int64_t num_experts, top_k;
  std::function<int64_t(int rank)> tokens;
  std::function<int32_t(int64_t token, int64_t choice)> id;
};

inline const std::vector<RoutingCase>& routing_cases() {
  auto mixed = [](int64_t t, int64_t k) { return static_cast<int32_t>((t * 5 + k * 3 + t / 4) % 8); };
  static const std::vector<RoutingCase> cases = {
      {"Mixed", 8, 2, [](int) { return 6; }, mixed},
      {"UnevenTokens", 8, 2, [](int r) { return 3 + 2 * r; }, mixed},
      {"ARankWithoutTokens", 8, 3, [](int r) { return r == 1 ? 0 : 5; }, mixed},
      {"NoTokensAtAll", 8, 2, [](int) { return 0; }, mixed},
      {"OneTokenOnTheLastRank", 8, 2, [](int r) { return r == 3 ? 1 : 0; }, mixed},
      {"AllToOneExpert", 8, 1, [](int) { return 4; }, [](int64_t, int64_t) { return 7; }},
      {"AllToTheFirstRank", 8, 2, [](int r) { return 2 + r; },
       [](int64_t t, int64_t k) { return static_cast<int32_t>((t + k) % 2); }},
      {"SomeDropped", 8, 2, [](int) { return 5; },
       [](int64_t t, int64_t k) { return (t + k) % 3 == 0 ? -1 : static_cast<int32_t>((t + k) % 8); }},
      {"AllDropped", 8, 2, [](int) { return 3; }, [](int64_t, int64_t) { return -1; }},
      {"EmptyExperts", 16, 2, [](int) { return 4; },
       [](int64_t t, int64_t k) { return static_cast<int32_t>(5 * ((t + k) % 3)); }},
      {"RankDistinct", 8, 2, [](int) { return 4; },
       [](int64_t t, int64_t k) { return static_cast<int32_t>((t / 4 * 3 + k) % 8); }},
      {"TheSameExpertTwice", 8, 2, [](int) { return 3; },
       [](int64_t t, int64_t) { return static_cast<int32_t>(t % 8); }},
      {"OneExpertPerRank", 4, 2, [](int) { return 3; },
       [](int64_t t, int64_t k) { return static_cast<int32_t>((t + k) % 4); }},
  };
  return cases;
}

struct DispatchResult {
  Tensor x_RD, y_TD, dx_TD, dweights_TK;
  std::vector<int64_t> rows_per_expert;
  Traffic traffic;  // forward and backward
};

/// Expert e multiplies by e + 1 and squares, so a row at the wrong expert shows, and its gradient too.
inline Tensor expert_work(const Dispatched& d, int64_t first_expert) {
  const Tensor scale = Tensor::empty(d.x_RD.shape(), d.x_RD.dtype());
  int64_t row = 0;
  dispatch_float(scale.dtype(), "expert_work", [&]<class T>() {
    for (size_t e = 0; e < d.rows_per_expert.size(); e++) {
      for (int64_t i = 0; i < d.rows_per_expert[e] * scale.size(1); i++)
        scale.data<T>()[row * scale.size(1) + i] = static_cast<T>(first_expert + static_cast<int64_t>(e) + 1);
      row += d.rows_per_expert[e];
    }
  });
  return mul(mul(d.x_RD, scale.to(d.x_RD.device())), d.x_RD);
}

/// How rows travel.
struct DispatchWay {
  int64_t chunks = 1;  // of all_to_all
  bool padded = false;
  int ranks_per_node = 0;  // 0: all on one
};

inline std::unique_ptr<Dispatcher> make_dispatcher(Communicator& group, const std::string& kind,
                                                   int64_t num_experts, const DispatchWay& way) {
  Choice choice{kind, DispatcherRegistry::instance().make_options(kind)};
  ConfigErrors errors;
  if (way.chunks != 1)
    parse_fields(
        load_yaml_text(str("{chunks: ", way.chunks, "}"), "test", errors), "",
        [&](FieldVisitor& v) { choice.options->fields(v); }, errors);
  errors.throw_if_any();
  std::vector<int> nodes;
  for (int r = 0; way.ranks_per_node > 0 && r < group.size(); r++) nodes.push_back(r / way.ranks_per_node);
  group.traffic().set_nodes(nodes);
  return DispatcherRegistry::make(choice, DispatcherContext{&group, num_experts});
}

/// The most assignments of one expert.
inline int64_t most_rows(const std::vector<int32_t>& ids) {
  int64_t most = 0;
  for (const int32_t id : ids) most = std::max<int64_t>(most, id < 0 ? 0 : std::ranges::count(ids, id));
  return most;
}

/// Collective over the group. Values depend on the global token only. Everything happens on `device`; results
/// are on the cpu.
inline DispatchResult run_dispatch(Communicator& group, const std::string& kind, const RoutingCase& c,
                                   DType dtype, Device device = {}, const DispatchWay& way = {}) {
  constexpr int64_t kWidth = 5;
  int64_t first = 0, total = 0;
  for (int r = 0; r < group.size(); r++) {
    if (r < group.rank()) first += c.tokens(r);
    total += c.tokens(r);
  }
  const int64_t num_tokens = c.tokens(group.rank());
  std::vector<int32_t> ids;
  for (int64_t t = first; t < first + num_tokens; t++) {
    for (int64_t k = 0; k < c.top_k; k++) ids.push_back(c.id(t, k));
  }
  auto part = [&](int64_t width, uint64_t seed) {
    return random_tensor({total, width}, dtype, seed).rows(first, first + num_tokens).clone().to(device);
  };
  Tensor x = part(kWidth, 1), weights = part(c.top_k, 2);
  Leaf x_leaf, weights_leaf;
  x_leaf.grad_dtype = weights_leaf.grad_dtype = dtype;
  x.grad_ref.leaf = &x_leaf;
  weights.grad_ref.leaf = &weights_leaf;

  const auto dispatcher = make_dispatcher(group, kind, c.num_experts, way);
  const Traffic before = group.traffic().ledger();
  const int64_t rows_each = !way.padded ? Dispatcher::kAsNeeded : num_tokens > 0 ? most_rows(ids) + 1 : 0;
  const Tensor expert_ids = Tensor::from(ids, {num_tokens, c.top_k}, device);
  const ShardRange shard = shard_range(c.num_experts, {group.rank(), group.size()});
  Tape tape;
  Tensor y;
  Dispatched d;
  if (const auto parts = dispatcher->dispatch_parts(x, expert_ids, rows_each)) {
    d.x_RD = Tensor::empty({0, kWidth}, dtype, device);
    d.rows_per_expert.assign(static_cast<size_t>(shard.end - shard.begin), 0);
    for (int64_t i = 0; i < parts->num_parts(); i++) {
      const Dispatched part = parts->arrive(i);
      for (size_t e = 0; e < part.rows_per_expert.size(); e++)
        d.rows_per_expert[e] += part.rows_per_expert[e];
      const Tensor before = d.x_RD;
      d.x_RD = Tensor::empty({before.size(0) + part.x_RD.size(0), kWidth}, dtype, device);
      d.x_RD.rows(0, before.size(0)).copy_from(before);
      d.x_RD.rows(before.size(0), d.x_RD.size(0)).copy_from(part.x_RD.detach());
      parts->send_back(i, expert_work(part, shard.begin));
    }
    y = parts->combine(weights);
  } else {
    d = dispatcher->dispatch(x, expert_ids, rows_each).wait();
    y = dispatcher->combine(expert_work(d, shard.begin), weights, d.plan).wait();
  }
  const auto to_cpu = [](const Tensor& t) { return t.clone().to(Device{}); };
  DispatchResult result{to_cpu(d.x_RD), to_cpu(y), {}, {}, d.rows_per_expert, {}};
  tape.backward({y}, {part(kWidth, 3)});
  result.traffic = group.traffic().ledger() - before;
  result.dx_TD = to_cpu(x_leaf.grad);
  result.dweights_TK = to_cpu(weights_leaf.grad);
  return result;
}

}  // namespace shoal::testing
