// Tape: a linear record of one forward pass. backward() walks it in exact reverse order and frees each record
// at once, so every rank issues the same collectives in the same order and memory falls as backward runs. A
// tape belongs to the thread that made it; the newest one is that thread's active tape.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/autograd/function.h"
#include "core/base/profiler.h"
#include "core/tensor/tensor.h"

namespace shoal {

class Tape {
 public:
  enum class Mode {
    record,      // normal
    count_uses,  // inside recompute's first forward: no records, but uses of leaves are counted
    off,         // no gradients (NoGrad)
  };
  explicit Tape(Mode mode = Mode::record) : Tape(mode, /*replay=*/false) {}
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  /// Backward from a scalar (seed 1). The tape is empty afterwards.
  void backward(const Tensor& loss);
  /// Backward from several outputs with given gradients (an undefined gradient counts as none).
  void backward(const std::vector<Tensor>& outputs, const std::vector<Tensor>& grads);

  /// What a loss starts backward with: 1, in its dtype (f32 or f64).
  static Tensor unit_gradient(const Tensor& loss);

  /// Ends the recording: the tape that was active before is so again, and this one may be run backward later,
  /// while others are open. Call it while this is the active tape. backward() of a parked tape makes it the
  /// active one for its time.
  void park();

  size_t num_records() const { return records_.size(); }

  /// Calls `passed` when backward passes this place of the calling thread's active tape; never where nothing
  /// is recorded.
  static void on_backward(std::function<void()> passed);
  /// Whether the calling thread's active tape records.
  static bool recording();

  /// The calling thread's active tape, or nullptr.
  static Tape* active();
  /// True while a forward pass is run a second time by recompute: counters must not count again.
  static bool replaying();

 private:
  friend class RecomputeFunction;
  friend class Recipe;
  template <class F, class... In>
  friend auto apply(F function, const In&... inputs);

  struct Record {
    std::unique_ptr<Function> function;
    std::vector<GradRef> outputs;
    std::vector<Shape> output_shapes;  // a consumer may have seen a view of another shape
    std::vector<Shape> input_shapes;
    std::vector<Device> input_devices;
    Profiler::Node scope = 0;  // where forward ran
  };

  Tape(Mode mode, bool replay);
  /// Fills the function's needs_ and inputs_; returns whether it must be recorded.
  static bool prepare(Function& function, std::vector<GradRef> refs);
  /// After forward: one of the next two. Uses of leaves are counted here, so that a forward that throws
  /// leaves no count behind.
  static void count_uses(const Function& function);
  static void finish(std::unique_ptr<Function> function, const std::vector<Tensor*>& outputs,
                     const std::vector<const Tensor*>& inputs);
  GradRef new_slot();
  void deliver(const GradRef& to, const Tensor& grad, const Shape& shape, Device device);
  void run(Record& record);
  void run_all();
  void enter();
  void leave();

  uint64_t id_;
  Tape* previous_ = nullptr;
  Mode mode_;
  bool replay_, parked_ = false;
  std::vector<Record> records_;
  std::vector<Tensor> slots_;
  std::vector<Leaf*> counted_;  // Mode::count_uses: uses to take back unless recompute keeps them
};

/// No gradients are recorded on this thread while it lives.
class NoGrad {
 public:
  NoGrad() : tape_(Tape::Mode::off) {}

 private:
  Tape tape_;
};

/// Runs function.forward(inputs...) and, when an input wants a gradient, moves the function onto the active
/// tape. forward returns a Tensor or a std::vector<Tensor>; so does apply. Inputs may be undefined (optional
/// arguments).
template <class F, class... In>
auto apply(F function, const In&... inputs) {
  auto owned = std::make_unique<F>(std::move(function));
  const bool recorded = Tape::prepare(*owned, {inputs.grad_ref...});
  auto result = owned->forward(inputs.detach()...);
  if (recorded) {
    std::vector<Tensor*> outputs;
    if constexpr (std::is_same_v<decltype(result), Tensor>) {
      outputs.push_back(&result);
    } else {
      for (Tensor& t : result) outputs.push_back(&t);
    }
    Tape::finish(std::move(owned), outputs, {&inputs...});
  } else {
    Tape::count_uses(*owned);
  }
  return result;
}

}  // namespace shoal
