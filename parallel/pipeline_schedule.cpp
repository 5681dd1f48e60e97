#include "parallel/pipeline_schedule.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <tuple>

#include "core/base/error.h"

namespace shoal {

using Kind = PipelineAction::Kind;

std::string PipelineAction::text() const {
  static constexpr const char* kNames[] = {"forward", "backward", "backward_input", "backward_weight"};
  return str(kNames[static_cast<size_t>(kind)], " of micro-batch ", micro_batch, " by stage ", stage);
}

PipelineKind pipeline_kind(const std::string& name) {
  for (const auto& [known, kind] :
       {std::pair{"gpipe", PipelineKind::gpipe}, std::pair{"1f1b", PipelineKind::one_f_one_b},
        std::pair{"interleaved", PipelineKind::interleaved},
        std::pair{"zero_bubble", PipelineKind::zero_bubble}}) {
    if (name == known) return kind;
  }
  throw Error(str("pipeline schedule: expected gpipe | 1f1b | interleaved | zero_bubble, got '", name, "'"));
}

int64_t PipelineCosts::of(Kind kind) const {
  if (kind == Kind::forward) return forward;
  if (kind == Kind::backward_input) return backward_input;
  return kind == Kind::backward_weight ? backward_weight : backward_input + backward_weight;
}

namespace {

/// The action whose result this one needs, if it needs one, beside the forward of its own stage.
std::optional<PipelineAction> input_of(const PipelineAction& a, int num_stages, bool split) {
  if (a.kind == Kind::forward) {
    if (a.stage == 0) return std::nullopt;
    return PipelineAction{Kind::forward, a.stage - 1, a.micro_batch};
  }
  if (a.kind == Kind::backward_weight) return PipelineAction{Kind::backward_input, a.stage, a.micro_batch};
  if (a.stage == num_stages - 1) return PipelineAction{Kind::forward, a.stage, a.micro_batch};
  return PipelineAction{split ? Kind::backward_input : Kind::backward, a.stage + 1, a.micro_batch};
}

using ActionKey = std::tuple<Kind, int, int>;
ActionKey key_of(const PipelineAction& a) {
  return {a.kind, a.stage, a.micro_batch};
}

/// num_warmup forwards, then one backward behind each further forward, then the remaining backwards.
std::vector<PipelineAction> warm_up_and_alternate(int count, int num_warmup, auto&& forward,
                                                  auto&& backward) {
  std::vector<PipelineAction> actions;
  for (int k = 0; k < count + num_warmup; k++) {
    if (k < count) actions.push_back(forward(k));
    if (k >= num_warmup) actions.push_back(backward(k - num_warmup));
  }
  return actions;
}

/// Micro-batches go in groups of p, which pass all stages of a rank one after the other.
std::vector<PipelineAction> interleaved_rank(const PipelineShape& shape, int rank) {
  const int p = shape.num_ranks, v = shape.virtual_stages, count = shape.num_micro_batches * v;
  const auto action = [&](Kind kind, int k) {
    const int chunk = k / p % v, micro_batch = k / (p * v) * p + k % p;
    return PipelineAction{kind, (kind == Kind::forward ? chunk : v - 1 - chunk) * p + rank, micro_batch};
  };
  const int warmup = std::min(count, 2 * (p - 1 - rank) + (v - 1) * p);
  return warm_up_and_alternate(
      count, warmup, [&](int k) { return action(Kind::forward, k); },
      [&](int k) { return action(Kind::backward, k); });
}

/// ZB-H1: input gradients as early as possible, forwards while fewer than p micro-batches are kept, as in
/// 1f1b, and weight gradients where there is nothing else to do. Found by letting time pass.
PipelineSchedule zero_bubble_schedule(const PipelineShape& shape) {
  const int p = shape.num_ranks, m = shape.num_micro_batches;
  struct Rank {
    int forwards = 0, inputs = 0, weights = 0;  // done
    std::vector<int64_t> forward_end, input_end;
  };
  std::vector<Rank> ranks(static_cast<size_t>(p));
  PipelineSchedule schedule{shape, std::vector<std::vector<PipelineAction>>(static_cast<size_t>(p))};
  const auto there = [&](const std::vector<int64_t>& ends, int micro_batch, int64_t now) {
    return micro_batch < std::ssize(ends) && ends[static_cast<size_t>(micro_batch)] <= now;
  };
  for (int64_t now = 0; std::ranges::any_of(ranks, [&](const Rank& r) { return r.weights < m; }); now++) {
    for (int i = 0; i < p; i++) {
      Rank& r = ranks[static_cast<size_t>(i)];
      auto& actions = schedule.ranks[static_cast<size_t>(i)];
      const bool can_input =
          r.inputs < r.forwards &&
          (i == p - 1 || there(ranks[static_cast<size_t>(i) + 1].input_end, r.inputs, now));
      const bool can_forward =
          r.forwards < m && r.forwards - r.weights < p &&
          (i == 0 || there(ranks[static_cast<size_t>(i) - 1].forward_end, r.forwards, now));
      // As in 1f1b a rank is p - 1 - i forwards ahead, so that the gradients that come next are in time.
      const bool ahead = r.forwards - r.inputs > p - 1 - i;
      if (can_input && (ahead || !can_forward)) {
        actions.push_back({Kind::backward_input, i, r.inputs++});
        r.input_end.push_back(now + 1);
      } else if (can_forward) {
        actions.push_back({Kind::forward, i, r.forwards++});
        r.forward_end.push_back(now + 1);
      } else if (r.weights < r.inputs) {
        actions.push_back({Kind::backward_weight, i, r.weights++});
      }
    }
  }
  return schedule;
}

void check_shape(PipelineKind kind, const PipelineShape& shape) {
  const auto& [p, v, m] = shape;
  SHOAL_CHECK(p >= 1 && v >= 1 && m >= 1, "pipeline: expected ranks, stages and micro-batches >= 1, got ", p,
              ", ", v, " and ", m);
  SHOAL_CHECK(v == 1 || (kind == PipelineKind::interleaved && p > 1),
              "pipeline: several stages per rank need the interleaved schedule and more than one rank, got ",
              v, " stages");
  SHOAL_CHECK(kind != PipelineKind::interleaved || m % p == 0, "pipeline: interleaved needs a multiple of ",
              p, " micro-batches, got ", m);
}

}  // namespace

PipelineSchedule make_pipeline_schedule(PipelineKind kind, const PipelineShape& shape) {
  check_shape(kind, shape);
  if (kind == PipelineKind::zero_bubble) return zero_bubble_schedule(shape);
  PipelineSchedule schedule{shape, {}};
  const int p = shape.num_ranks, m = shape.num_micro_batches;
  for (int rank = 0; rank < p; rank++) {
    if (kind == PipelineKind::interleaved) {
      schedule.ranks.push_back(interleaved_rank(shape, rank));
      continue;
    }
    const int warmup = kind == PipelineKind::gpipe ? m - 1 : std::min(m, p - 1 - rank);
    schedule.ranks.push_back(warm_up_and_alternate(
        m, warmup,
        [&](int k) {
          return PipelineAction{Kind::forward, rank, k};
        },
        [&](int k) {
          return PipelineAction{Kind::backward, rank, k};
        }));
  }
  return schedule;
}

PipelineSchedule make_forward_schedule(const PipelineShape& shape) {
  PipelineSchedule schedule{shape, {}};
  const int p = shape.num_ranks, v = shape.virtual_stages, m = shape.num_micro_batches;
  for (int rank = 0; rank < p; rank++) {
    auto& actions = schedule.ranks.emplace_back();
    for (int first = 0; first < m; first += p) {
      for (int chunk = 0; chunk < v; chunk++) {
        for (int b = first; b < std::min(m, first + p); b++)
          actions.push_back({Kind::forward, chunk * p + rank, b});
      }
    }
  }
  return schedule;
}

PipelineTimes time_schedule(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  const int num_stages = schedule.shape.num_stages();
  bool split = false;
  for (const auto& actions : schedule.ranks) {
    for (const PipelineAction& a : actions) split |= a.kind == Kind::backward_input;
  }
  std::map<ActionKey, int64_t> ends;
  PipelineTimes times;
  times.ranks.resize(schedule.ranks.size());
  bool moved = true;
  while (moved) {
    moved = false;
    for (size_t r = 0; r < schedule.ranks.size(); r++) {
      const auto& actions = schedule.ranks[r];
      auto& spans = times.ranks[r];
      for (; spans.size() < actions.size(); moved = true) {
        const PipelineAction& a = actions[spans.size()];
        int64_t begin = spans.empty() ? 0 : spans.back().end;
        if (const auto input = input_of(a, num_stages, split)) {
          const auto made = ends.find(key_of(*input));
          if (made == ends.end()) break;
          begin = std::max(begin, made->second);
        }
        if (a.kind != Kind::forward && !ends.contains({Kind::forward, a.stage, a.micro_batch})) break;
        const int64_t end = begin + costs.of(a.kind);
        spans.push_back({begin, end});
        ends[key_of(a)] = end;
        times.total = std::max(times.total, end);
      }
    }
  }
  std::string waiting;
  for (size_t r = 0; r < schedule.ranks.size(); r++) {
    if (times.ranks[r].size() < schedule.ranks[r].size())
      waiting += str(waiting.empty() ? "" : ", ", "rank ", r, " in ",
                     schedule.ranks[r][times.ranks[r].size()].text());
  }
  SHOAL_CHECK(waiting.empty(), "pipeline schedule: ranks wait for each other: ", waiting);
  return times;
}

std::vector<PipelineStep> pipeline_steps(const PipelineSchedule& schedule, int rank) {
  const PipelineTimes times = time_schedule(schedule);
  const int num_stages = schedule.shape.num_stages();
  struct Timed {
    int64_t end;
    PipelineTransfer transfer;
    auto key() const { return std::tuple{end, transfer.from, transfer.made_by.stage}; }
  };
  std::vector<Timed> own;  // transfers of this rank
  for (int from = 0; from < std::ssize(schedule.ranks); from++) {
    for (size_t i = 0; i < schedule.ranks[static_cast<size_t>(from)].size(); i++) {
      const PipelineAction& a = schedule.ranks[static_cast<size_t>(from)][i];
      if (a.kind == Kind::backward_weight) continue;
      const int next = a.kind == Kind::forward ? a.stage + 1 : a.stage - 1;
      if (next < 0 || next >= num_stages) continue;
      const int to = schedule.shape.rank_of(next);
      if (to == from || (from != rank && to != rank)) continue;
      own.push_back({times.ranks[static_cast<size_t>(from)][i].end, {from, to, a}});
    }
  }
  std::ranges::sort(own, {}, &Timed::key);
  std::vector<PipelineStep> steps;
  size_t at = 0;
  for (const PipelineAction& action : schedule.ranks[static_cast<size_t>(rank)]) {
    PipelineStep step{action, {}, {}};
    // What is ordered before this action's own transfer, or needed by it; all of them are receives, because
    // own transfers of earlier actions are behind those.
    const auto sent = std::ranges::find_if(
        own, [&](const Timed& t) { return t.transfer.from == rank && t.transfer.made_by == action; });
    const int64_t end = times.ranks[static_cast<size_t>(rank)][steps.size()].end;
    while (at < own.size() && own[at].transfer.to == rank &&
           (sent != own.end() ? own[at].key() < sent->key() : own[at].end < end))
      step.receives.push_back(own[at++].transfer);
    if (sent != own.end()) {
      step.sends.push_back(sent->transfer);
      at++;
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

}  // namespace shoal
