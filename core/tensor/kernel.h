// Kernel<Sig>: a named function with one implementation per device. Ops declare kernels; backends fill them
// in, each kernel file at its end: `const bool added = rms_norm_fwd.add(DeviceType::cpu, &impl, kIsaLevel);`.
// Kernels are `inline constinit`, so registration never meets an unconstructed table. A kernel knows what a
// call costs (for the profiler): a function of its arguments given beside its name, or else the bytes of the
// tensors among them.
#pragma once

#include <array>
#include <string>
#include <type_traits>

#include "core/base/profiler.h"
#include "core/tensor/types.h"

namespace shoal {

/// Instruction sets the CPU kernels are compiled for. cpu_isa() is the best one this machine supports and
/// this build has (CMake's SHOAL_CPU_ISAS), or the lower one named by the environment variable SHOAL_CPU_ISA
/// (scalar | avx2 | avx512 | avx512_bf16).
enum class CpuIsa : int { scalar = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };
CpuIsa cpu_isa();
/// That choice: the best set of `built` (names joined by commas; scalar always is) that is not above
/// `supported` nor, when it names a set, above `forced`.
CpuIsa choose_cpu_isa(CpuIsa supported, const std::string& built, const char* forced);
const char* cpu_isa_name(CpuIsa isa);

class Tensor;

/// Bytes of the tensors among some arguments, or of a list of tensors.
template <class... Args>
double bytes_of(const Args&... args) {
  const auto one = [](const auto& argument) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, Tensor>) {
      return argument.defined() ? static_cast<double>(argument.num_bytes()) : 0.0;
    } else {
      return 0.0;
    }
  };
  return (one(args) + ... + 0.0);
}

template <class Signature>
class Kernel;

template <class Result, class... Args>
class Kernel<Result(Args...)> {
 public:
  using Function = Result (*)(Args...);
  using CostFunction = Cost (*)(Args...);
  constexpr explicit Kernel(const char* name, CostFunction cost = nullptr) : name_(name), cost_(cost) {}

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
    if (Profiler* profiler = Profiler::active(); profiler != nullptr) [[unlikely]]
      return profiled(*profiler, slot.function, args...);
    return slot.function(args...);
  }
  const char* name() const { return name_; }
  Cost cost(Args... args) const {
    if (cost_ != nullptr) return cost_(args...);
    return {.bytes = bytes_of(args...)};
  }

 private:
  struct Slot {
    Function function = nullptr;
    CpuIsa level = CpuIsa::scalar;
  };
  [[gnu::noinline]] Result profiled(Profiler& profiler, Function function, Args... args) const {
    const ProfileCall call(profiler, name_, cost(args...));
    return function(args...);
  }

  const char* name_;
  CostFunction cost_;
  std::array<Slot, kNumDeviceTypes> slots_{};
};

}  // namespace shoal
