#include "core/base/profiler.h"

#include <chrono>
#include <cstring>

#include "core/base/error.h"

namespace shoal {

namespace {

bool same(const char* a, const char* b) {
  return a == b || std::strcmp(a, b) == 0;  // equal literals may have several addresses
}

}  // namespace

int64_t Profiler::now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Profiler::Profiler(size_t max_events) : events_(max_events) {
  nodes_.reserve(kMaxNodes);
  rows_.reserve(256);
  row_named(kOther);
  row_named(kExchange);
  nodes_.push_back({"step", -1, 0, 0, false, 0, 0});
}

Profiler::~Profiler() {
  if (active_ == this) active_ = nullptr;
}

void Profiler::start(int64_t step) {
  SHOAL_CHECK(active_ == nullptr && depth_ == 0, "Profiler: started twice on one thread");
  num_stretches_++;
  phase_ = Phase::none;
  push("step", static_cast<int32_t>(step), 0, 0, Kind::scope, now_ns());
  active_ = this;
}

void Profiler::stop() {
  SHOAL_CHECK(active_ == this, "Profiler: stopped on a thread that it does not observe");
  const int64_t now = now_ns();
  total_ns_ += now - stack_[0].event.begin_ns;
  while (depth_ > 0) pop(now);
  skipped_ = 0;
  active_ = nullptr;
}

uint16_t Profiler::row_named(const char* name) {
  for (size_t i = 0; i < rows_.size(); i++) {
    if (same(rows_[i].name, name)) return static_cast<uint16_t>(i);
  }
  rows_.emplace_back();
  rows_.back().name = name;
  return static_cast<uint16_t>(rows_.size() - 1);
}

Profiler::Node Profiler::child_of(Node parent, const char* name, int32_t index, const char* section,
                                  bool whole) {
  for (Node n = nodes_[parent].first_child; n != 0; n = nodes_[n].next_sibling) {
    if (nodes_[n].index == index && same(nodes_[n].name, name)) return n;
  }
  if (nodes_.size() == kMaxNodes) return parent;
  const ScopeNode& above = nodes_[parent];
  const bool own = section != nullptr && !above.whole;
  nodes_.push_back({name, index, parent, own ? row_named(section) : above.row, above.whole || whole, 0,
                    above.first_child});
  const auto made = static_cast<Node>(nodes_.size() - 1);
  nodes_[parent].first_child = made;
  return made;
}

void Profiler::push(const char* name, int32_t index, Node node, uint16_t row, Kind kind, int64_t now) {
  if (depth_ == kMaxDepth) {
    skipped_++;
    return;
  }
  Span& span = stack_[static_cast<size_t>(depth_++)];
  span = Span{};
  span.event.begin_ns = now;
  span.event.name = name;
  span.event.index = index;
  span.event.node = node;
  span.event.kind = kind;
  span.event.phase = phase_;
  span.node = node;
  span.row = row;
}

void Profiler::pop(int64_t now) {
  if (skipped_ > 0) {
    skipped_--;
    return;
  }
  Span& span = stack_[static_cast<size_t>(--depth_)];
  Event& event = span.event;
  event.end_ns = now;
  const int64_t duration = now - event.begin_ns;
  Row& row = rows_[span.row];
  row.ns[static_cast<size_t>(event.phase)] += duration - span.inner_ns;
  row.cost += event.cost;
  row.calls += event.kind != Kind::scope && !event.waits;
  if (event.waits) row.collective_bytes += event.collective.bytes;
  if (depth_ > 0) stack_[static_cast<size_t>(depth_) - 1].inner_ns += duration;
  if (num_events_ < events_.size()) {
    events_[num_events_++] = event;
  } else {
    num_dropped_++;
  }
}

void Profiler::enter(const char* name, int32_t index, const char* section, bool whole) {
  const Node child = child_of(node(), name, index, section, whole);
  push(name, index, child, nodes_[child].row, Kind::scope, now_ns());
}

void Profiler::enter_phase(Phase phase) {
  const Node here = node();
  push(phase == Phase::backward ? "backward" : "forward", -1, here, nodes_[here].row, Kind::scope, now_ns());
  if (skipped_ > 0) return;
  // The span itself and all inside it; leave() turns back.
  stack_[static_cast<size_t>(depth_) - 1].event.phase = phase;
  phase_ = phase;
}

uint16_t Profiler::row_of_collective(Node node) const {
  constexpr uint16_t kExchangeRow = 1;
  return nodes_[node].whole ? nodes_[node].row : kExchangeRow;
}

size_t Profiler::row_of(const Event& event) const {
  return event.kind == Kind::collective ? row_of_collective(event.node) : nodes_[event.node].row;
}

bool Profiler::enter_kernel(const char* name, const Cost& cost) {
  const Span& top = stack_[static_cast<size_t>(depth_) - 1];
  if (top.event.kind == Kind::kernel) return false;
  push(name, -1, top.node, top.row, Kind::kernel, now_ns());
  if (skipped_ == 0) stack_[static_cast<size_t>(depth_) - 1].event.cost = cost;
  return true;
}

bool Profiler::enter_collective(const CollectiveId& id, bool waits) {
  const Span& top = stack_[static_cast<size_t>(depth_) - 1];
  if (top.event.kind == Kind::collective) return false;
  push(id.name, -1, top.node, row_of_collective(top.node), Kind::collective, now_ns());
  if (skipped_ > 0) return true;
  Event& event = stack_[static_cast<size_t>(depth_) - 1].event;
  event.collective = id;
  event.waits = waits;
  return true;
}

void Profiler::leave() {
  pop(now_ns());
  if (skipped_ == 0) phase_ = stack_[static_cast<size_t>(depth_) - 1].event.phase;
}

void Profiler::leave_to(int depth) {
  while (depth_ + skipped_ > depth) leave();
}

void Profiler::move_to(Node target, int depth) {
  // Scopes from the tree's root, or from the scope at `depth`, down to the target.
  std::array<Node, kMaxDepth> path;
  size_t length = 0;
  if (depth > kMaxDepth) return;
  const Node base = stack_[static_cast<size_t>(depth) - 1].node;
  for (Node n = target; n != 0 && n != base && length < path.size(); n = nodes_[n].parent) path[length++] = n;
  const int64_t now = now_ns();
  size_t common = 0;
  while (common < length && depth + static_cast<int>(common) < depth_ &&
         stack_[static_cast<size_t>(depth) + common].node == path[length - 1 - common])
    common++;
  while (skipped_ + depth_ > depth + static_cast<int>(common)) pop(now);
  for (size_t i = common; i < length; i++) {
    const Node n = path[length - 1 - i];
    push(nodes_[n].name, nodes_[n].index, n, nodes_[n].row, Kind::scope, now);
  }
}

}  // namespace shoal
