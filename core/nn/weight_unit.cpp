#include "core/nn/weight_unit.h"

#include "core/autograd/tape.h"

namespace shoal {

void WeightUnit::begin() {
  if (!on_begin) return;
  on_begin(Tape::replaying() ? Direction::backward : Direction::forward);
  if (!forward_only) Tape::on_backward([this] { on_end(); });
}

void WeightUnit::end() {
  if (!on_begin) return;
  const bool backward_follows = Tape::replaying() && Tape::recording() && !forward_only;
  if (backward_follows) return;
  on_end();
  if (!forward_only) Tape::on_backward([this] { on_begin(Direction::backward); });
}

}  // namespace shoal
