// The tests of CUDA kernels on a GPU: what they ask of the emulator, where there is none. Schedules are then
// repetitions.
#include "tests/cuda/emulator/machine.h"

namespace shoal::emulator {

Options& options() {
  static Options options;
  return options;
}
std::vector<Barrier> barriers_seen() {
  return {};
}
std::string Barrier::name() const {
  return "";
}
int races() {
  return 0;
}

}  // namespace shoal::emulator
