#include "core/backend/cpu/gemm/engine.h"

#include <cstdlib>

#include "core/base/text.h"

namespace shoal::cpu {

namespace {

class TiledEngine final : public GemmEngine {
 public:
  const char* name() const override { return "tiled"; }
  void run(const GemmCall<float>& call) const override { tiled_gemm_f32(Device{}, call); }
  void run(const GemmCall<double>& call) const override { tiled_gemm_f64(Device{}, call); }
};

const GemmEngine& choose() {
  if (const char* forced = std::getenv("SHOAL_GEMM"); forced != nullptr && *forced != '\0') {
    return gemm_engine_named(forced);
  }
#if defined(__SANITIZE_THREAD__)
  return reference_engine();
#else
  // Without wide vectors OpenBLAS, which has its own dispatch, is the faster one.
  return cpu_isa() == CpuIsa::scalar ? openblas_engine() : tiled_engine();
#endif
}

}  // namespace

const GemmEngine& tiled_engine() {
  static const TiledEngine engine;
  return engine;
}

const std::vector<const GemmEngine*>& gemm_engines() {
  static const std::vector<const GemmEngine*> engines{&reference_engine(), &openblas_engine(),
                                                      &tiled_engine()};
  return engines;
}

const GemmEngine& gemm_engine_named(const std::string& name) {
  std::vector<std::string> names;
  for (const GemmEngine* engine : gemm_engines()) {
    if (name == engine->name()) return *engine;
    names.emplace_back(engine->name());
  }
  throw UsageError(str("SHOAL_GEMM: unknown engine '", name, "'", suggest(name, names), "; choose one of ",
                       join(names, " | "), ", or unset it for the fastest"));
}

const GemmEngine& gemm_engine() {
  static const GemmEngine& engine = choose();
  return engine;
}

}  // namespace shoal::cpu
