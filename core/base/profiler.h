// Profiler: where the time of one thread goes. While one is active on a thread, scopes of the model, kernels
// and collectives open and close nested spans; every nanosecond between start() and stop() belongs to exactly
// one row of the table, the section of the innermost open span, so the rows sum to the whole. Off, which is
// the default, a span costs one look at a thread-local pointer. Observes only: nothing here changes a result.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace shoal {

/// What a kernel does: floating-point operations (multiply-adds count twice) that are executed, and bytes
/// that its operands take, each passed over once. flops_bf16: those on bf16 operands; flops: all others.
struct Cost {
  double flops = 0, flops_bf16 = 0, bytes = 0;
  double all_flops() const { return flops + flops_bf16; }
  Cost& operator+=(const Cost& other) {
    flops += other.flops;
    flops_bf16 += other.flops_bf16;
    bytes += other.bytes;
    return *this;
  }
};

/// A call on a communicator, recognised again on the other ranks of its group.
struct CollectiveId {
  const char* name = nullptr;
  const void* group = nullptr;  // the communicator, on this rank
  uint32_t call = 0;            // the how-manieth on this group
  double bytes = 0;             // payload
};

class Profiler {
 public:
  enum class Kind : uint8_t { scope, kernel, collective };
  enum class Phase : uint8_t { none, forward, backward };
  using PhaseTimes = std::array<int64_t, 3>;  // ns by Phase
  using Node = uint16_t;                      // a place in the tree of scopes; 0 is the root

  struct Row {
    const char* name = nullptr;
    PhaseTimes ns{};
    int64_t calls = 0;  // of kernels and collectives
    Cost cost;
    double collective_bytes = 0;
    int64_t total_ns() const { return ns[0] + ns[1] + ns[2]; }
  };
  struct Event {
    int64_t begin_ns = 0, end_ns = 0;  // steady clock
    const char* name = nullptr;
    Cost cost;
    CollectiveId collective;  // name: null unless it is one
    int32_t index = -1;       // of a layer; -1: none
    Node node = 0;            // the scope itself, or the one around a kernel
    Kind kind = Kind::scope;
    Phase phase = Phase::none;
    bool waits = false;  // the end of a collective, not its start
  };

  /// Keeps up to `max_events` events, in order of their ends; later ones are counted in num_dropped() only.
  explicit Profiler(size_t max_events);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// This thread's, or nullptr: off.
  static Profiler* active() { return active_; }
  /// The steady clock of all times here.
  static int64_t now_ns();
  /// Starts and ends one stretch, training step `step`, on the thread that is observed.
  void start(int64_t step);
  void stop();

  /// A scope whose time counts for the row `section`, or for the section around it when that is null. A
  /// `whole` section takes what is inside it too, sections and collectives included.
  void enter(const char* name, int32_t index, const char* section, bool whole);
  /// A span that is no place: scopes inside are children of those around it, so that a layer is the same one
  /// in both phases.
  void enter_phase(Phase phase);
  /// False, and nothing to leave, inside another kernel: that one's time and cost are all of it.
  bool enter_kernel(const char* name, const Cost& cost);
  /// The same inside another collective, as when one communicator passes its calls on.
  bool enter_collective(const CollectiveId& id, bool waits);
  void leave();
  /// Leaves all spans but the outermost `depth`.
  void leave_to(int depth);
  /// The current place, for move_to().
  Node node() const { return stack_[depth_ - 1].node; }
  int depth() const { return depth_ + skipped_; }
  /// Leaves and enters scopes until `node` is the current one; those below `depth` stay.
  void move_to(Node node, int depth);

  const std::vector<Row>& rows() const { return rows_; }
  const Event* events_begin() const { return events_.data(); }
  const Event* events_end() const { return events_.data() + num_events_; }
  int64_t num_dropped() const { return num_dropped_; }
  int64_t num_stretches() const { return num_stretches_; }
  int64_t total_ns() const { return total_ns_; }
  /// Index of the row that an event's own time counts for.
  size_t row_of(const Event& event) const;

  /// The row of what no section takes, and that of collectives outside `whole` sections.
  static constexpr const char* kOther = "other";
  static constexpr const char* kExchange = "exchange";

 private:
  struct ScopeNode {
    const char* name;
    int32_t index;
    Node parent;
    uint16_t row;
    bool whole;
    Node first_child = 0, next_sibling = 0;  // 0: none
  };
  struct Span {
    Event event;
    int64_t inner_ns = 0;  // of the spans inside
    Node node = 0;
    uint16_t row = 0;
  };
  static constexpr int kMaxDepth = 64;
  static constexpr size_t kMaxNodes = 8192;

  Node child_of(Node parent, const char* name, int32_t index, const char* section, bool whole);
  uint16_t row_named(const char* name);
  uint16_t row_of_collective(Node node) const;
  void push(const char* name, int32_t index, Node node, uint16_t row, Kind kind, int64_t now);
  void pop(int64_t now);

  static inline constinit thread_local Profiler* active_ = nullptr;

  std::vector<ScopeNode> nodes_;
  std::vector<Row> rows_;
  std::vector<Event> events_;  // full size from the start: a step must not allocate
  size_t num_events_ = 0;
  std::array<Span, kMaxDepth> stack_;
  int depth_ = 0;
  int skipped_ = 0;  // open spans beyond kMaxDepth
  Phase phase_ = Phase::none;
  int64_t num_dropped_ = 0, num_stretches_ = 0, total_ns_ = 0;
};

/// A part of the model or of a step, while it lives. Names are literals.
class ProfileScope {
 public:
  explicit ProfileScope(const char* name, int64_t index = -1, const char* section = nullptr,
                        bool whole = false)
      : profiler_(Profiler::active()) {
    if (profiler_ != nullptr) [[unlikely]]
      profiler_->enter(name, static_cast<int32_t>(index), section, whole);
  }
  ~ProfileScope() {
    if (profiler_ != nullptr) [[unlikely]]
      profiler_->leave();
  }
  ProfileScope(const ProfileScope&) = delete;
  ProfileScope& operator=(const ProfileScope&) = delete;

 private:
  Profiler* profiler_;
};

/// The forward pass, while it lives; Tape::backward() marks the backward pass itself.
class ProfileForward {
 public:
  ProfileForward() : profiler_(Profiler::active()) {
    if (profiler_ != nullptr) [[unlikely]]
      profiler_->enter_phase(Profiler::Phase::forward);
  }
  ~ProfileForward() {
    if (profiler_ != nullptr) [[unlikely]]
      profiler_->leave();
  }
  ProfileForward(const ProfileForward&) = delete;
  ProfileForward& operator=(const ProfileForward&) = delete;

 private:
  Profiler* profiler_;
};

/// A scope that is a row of the table.
class ProfileSection : public ProfileScope {
 public:
  static constexpr bool kWhole = true;
  explicit ProfileSection(const char* name, bool whole = false) : ProfileScope(name, -1, name, whole) {}
};

/// For Kernel, Work and communicators: a span that ends with its object. Does nothing without a profiler.
class ProfileCall {
 public:
  ProfileCall(Profiler& profiler, const char* kernel, const Cost& cost)
      : profiler_(profiler.enter_kernel(kernel, cost) ? &profiler : nullptr) {}
  ProfileCall(const CollectiveId& id, bool waits) : profiler_(id.name ? Profiler::active() : nullptr) {
    if (profiler_ != nullptr && !profiler_->enter_collective(id, waits)) [[unlikely]]
      profiler_ = nullptr;
  }
  ~ProfileCall() {
    if (profiler_ != nullptr) [[unlikely]]
      profiler_->leave();
  }
  ProfileCall(const ProfileCall&) = delete;
  ProfileCall& operator=(const ProfileCall&) = delete;

 private:
  Profiler* profiler_;
};

}  // namespace shoal
