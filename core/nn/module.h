// Module: a piece of a model that owns parameters, buffers and child modules. Registration order is the order
// of everything that walks the model, and is the same on every rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/nn/parameter.h"

namespace shoal {

/// What a module needs to know to make its parameters. child() gives the context of a named child.
struct BuildContext {
  std::string prefix;  // "" or "layers.3."
  Device device;
  DType dtype = DType::f32;  // of parameters, router and loss (f32, or f64 in tests)
  bool bf16 = false;         // mixed precision: with dtype f32, what flows between layers is bf16
  uint64_t seed = 0;
  AxisCoords coords;
  bool held = true;         // whether this pipeline stage holds the parameters (Parameter::held)
  bool fill_later = false;  // held parameters get memory and values from Parameter::fill
  /// Parameters get no memory and no values: to look at what a model is made of.
  bool shapes_only = false;

  /// The dtype of what flows between layers.
  DType compute_dtype() const { return bf16 ? DType::bf16 : dtype; }
  BuildContext child(const std::string& name) const {
    BuildContext context = *this;
    context.prefix += name + ".";
    return context;
  }
};

class Module {
 public:
  Module() = default;
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// This module's and its children's, in registration order.
  std::vector<Parameter*> parameters() const;
  std::vector<Buffer*> buffers() const;

 protected:
  Parameter& add_parameter(const BuildContext& context, const std::string& name, const Shape& global_shape,
                           const Init& init, ParamKind kind = ParamKind::matrix,
                           const Placement& placement = Placement::replicated());
  Buffer& add_buffer(const BuildContext& context, const std::string& name, const Tensor& value);
  /// Registers a child owned elsewhere (a member of the derived class).
  template <class M>
  M& add_module(M& child) {
    children_.push_back(&child);
    entries_.push_back({Entry::child, children_.size() - 1});
    return child;
  }

 private:
  struct Entry {
    enum Kind { parameter, buffer, child } kind;
    size_t index;
  };
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<Module*> children_;
  std::vector<Entry> entries_;
};

}  // namespace shoal
