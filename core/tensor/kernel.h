// Kernel<Sig>: a named function with one implementation per device. Ops declare kernels; backends fill them
// in, each kernel file at its end: `const bool added = rms_norm_fwd.add(DeviceType::cpu, &impl, kIsaLevel);`.
// Kernels are `inline constinit`, so registration never meets an unconstructed table.
#pragma once

#include <array>

#include "core/tensor/types.h"

namespace shoal {

/// Instruction sets the CPU kernels are compiled for. cpu_isa() is the best one this machine supports, or the
/// lower one named by the environment variable SHOAL_CPU_ISA (scalar | avx2 | avx512 | avx512_bf16).
enum class CpuIsa : int { scalar = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };
CpuIsa cpu_isa();
const char* cpu_isa_name(CpuIsa isa);

template <class Signature>
class Kernel;

template <class Result, class... Args>
class Kernel<Result(Args...)> {
 public:
  using Function = Result (*)(Args...);
  constexpr explicit Kernel(const char* name) : name_(name) {}

  /// The highest level that the machine supports wins. Returns true, for use in an initialiser.
  bool add(DeviceType type, Function function, CpuIsa level = CpuIsa::scalar) {
    Slot& slot = slots_[static_cast<size_t>(type)];
    if (level <= cpu_isa() && (slot.function == nullptr || level >= slot.level)) slot = {function, level};
    return true;
  }

  Result operator()(Device device, Args... args) const {
    const Slot& slot = slots_[static_cast<size_t>(device.type)];
    SHOAL_CHECK(slot.function != nullptr, name_, ": no kernel for device ", device,
                "; rebuild with that backend or move the tensors to cpu");
    return slot.function(args...);
  }
  const char* name() const { return name_; }

 private:
  struct Slot {
    Function function = nullptr;
    CpuIsa level = CpuIsa::scalar;
  };
  const char* name_;
  std::array<Slot, kNumDeviceTypes> slots_{};
};

}  // namespace shoal
