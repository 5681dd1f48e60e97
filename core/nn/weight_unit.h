// WeightUnit: parameters of a model that are used together, like those of a layer. The model says where their
// use begins and ends; who shares weights among ranks (parallel/weight_gather.h) has them there in between.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/nn/parameter.h"

namespace shoal {

struct WeightUnit {
  enum class Direction : uint8_t { forward, backward };

  std::string name;
  std::vector<Parameter*> parameters;
  int stage = 0;                      // pipeline stage that uses it
  bool held = true;                   // this rank has that stage
  bool forward_only = false;          // backward does not read the values
  const WeightUnit* outer = nullptr;  // whose use spans each use of this one

  /// Installed by who shares the weights; empty: they are there always.
  std::function<void(Direction direction)> on_begin;
  std::function<void()> on_end;

  /// The use of the values in forward; where a tape records, it also begins before backward passes end(), and
  /// ends after backward has passed begin(). In a forward pass that recompute runs a second time it goes on
  /// until then.
  void begin();
  void end();
  /// body() as one use.
  template <class Body>
  auto during(const Body& body) {
    begin();
    auto result = body();
    end();
    return result;
  }
};

}  // namespace shoal
