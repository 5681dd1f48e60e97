// Weight gradients put off: nothing in a backward pass waits for them, so a pipeline rank can compute them
// while it would wait for others (zero bubble, arXiv:2401.10241).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/autograd/function.h"

namespace shoal {

/// Beside Function a base of those whose backward can leave gradients of parameters for later.
class LateWeights {
 public:
  LateWeights() = default;
  LateWeights(LateWeights&&) = default;
  LateWeights& operator=(LateWeights&&) = default;
  virtual ~LateWeights() = default;
  /// Inputs, as bits, whose gradients may come later when they are parameters.
  virtual uint32_t late_inputs() const = 0;
  /// After a backward that found weights_later(): adds what that has left out to the parameters' gradients.
  virtual void backward_weights() = 0;

 protected:
  /// In backward: gradients of late_inputs() are to be left out, and what they need is to be kept.
  bool weights_later() const { return weights_later_; }

 private:
  friend class Tape;
  bool weights_later_ = false;
};

/// What backward passes have put off, with all that it needs.
class WeightQueue {
 public:
  WeightQueue() = default;
  ~WeightQueue();
  WeightQueue(const WeightQueue&) = delete;
  WeightQueue& operator=(const WeightQueue&) = delete;

  /// Computes it, in the order in which it was put off, and ends these uses of the parameters.
  void run();

  /// While it lives, backward passes of this thread put off into the queue what they can, recomputed parts
  /// included.
  class Scope {
   public:
    explicit Scope(WeightQueue& queue);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    WeightQueue* before_;
  };

 private:
  friend class Tape;
  static WeightQueue* active();
  struct Entry {
    std::unique_ptr<Function> function;
    LateWeights* late;          // the same object
    std::vector<Leaf*> leaves;  // whose use ends with it
  };
  std::vector<Entry> entries_;
};

}  // namespace shoal
