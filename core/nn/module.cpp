#include "core/nn/module.h"

#include "core/base/random.h"
#include "core/base/threads.h"

namespace shoal {

const char* axis_name(Axis axis) {
  static constexpr const char* kNames[kNumAxes] = {"tp", "cp", "dp", "pp", "etp", "ep", "edp"};
  return kNames[static_cast<size_t>(axis)];
}

ShardRange shard_range(int64_t size, AxisCoord coord) {
  const int64_t base = size / coord.size, larger = size % coord.size, i = coord.index;
  const int64_t begin = i * base + (i < larger ? i : larger);
  return {begin, begin + base + (i < larger ? 1 : 0)};
}

void fill_init(const Parameter& parameter, const Init& init, uint64_t seed) {
  const Tensor& value = parameter.value;
  if (init.kind == Init::Kind::zeros) return value.set_zero();
  // Generated on the host and copied: the bits must not depend on the device.
  const RandomStream random(seed, parameter.name);
  int64_t inner = 1, outer = 1;  // elements behind and before the sharded dimension
  const int dim = parameter.placement.shard_dim;
  const Shape& global = parameter.global_shape;
  for (int d = 0; d < global.dims(); d++) {
    if (d < dim) outer *= global[d];
    if (d > dim) inner *= global[d];
  }
  const int64_t global_rows = dim < 0 ? 1 : global[dim];
  const ShardRange shard = dim < 0 ? ShardRange{0, 1} : parameter.shard;
  const int64_t block = (shard.end - shard.begin) * inner;  // contiguous run of the shard
  dispatch_float(value.dtype(), "fill_init", [&]<class T>() {
    std::vector<T> host(static_cast<size_t>(value.numel()));
    parallel_for(value.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t index = (i / block * global_rows + shard.begin) * inner + i % block;
        host[static_cast<size_t>(i)] =
            init.kind == Init::Kind::ones
                ? T(1)
                : static_cast<T>(init.stddev * random.normal(static_cast<uint64_t>(index)));
      }
    });
    value.copy_from(Tensor::from(host, value.shape()));
  });
  SHOAL_CHECK(value.numel() == outer * block, "fill_init: ", parameter.name, ": shard ", value.shape(),
              " does not fit the global shape ", global);
}

std::vector<Parameter*> Module::parameters() const {
  std::vector<Parameter*> all;
  for (const Entry& entry : entries_) {
    if (entry.kind == Entry::parameter) all.push_back(parameters_[entry.index].get());
    if (entry.kind == Entry::child) {
      for (Parameter* p : children_[entry.index]->parameters()) all.push_back(p);
    }
  }
  return all;
}

std::vector<Buffer*> Module::buffers() const {
  std::vector<Buffer*> all;
  for (const Entry& entry : entries_) {
    if (entry.kind == Entry::buffer) all.push_back(buffers_[entry.index].get());
    if (entry.kind == Entry::child) {
      for (Buffer* b : children_[entry.index]->buffers()) all.push_back(b);
    }
  }
  return all;
}

Parameter& Module::add_parameter(const BuildContext& context, const std::string& name,
                                 const Shape& global_shape, const Init& init, ParamKind kind,
                                 const Placement& placement) {
  auto parameter = std::make_unique<Parameter>();
  parameter->name = context.prefix + name;
  parameter->global_shape = global_shape;
  parameter->placement = placement;
  parameter->kind = kind;
  Shape local = global_shape;
  if (placement.shard_dim >= 0) {
    parameter->shard = shard_range(global_shape[placement.shard_dim], context.coords[placement.shard_axis]);
    local.set(placement.shard_dim, parameter->shard.end - parameter->shard.begin);
  }
  parameter->value = Tensor::empty(local, context.dtype, context.device);
  parameter->leaf.grad_dtype = context.dtype == DType::f64 ? DType::f64 : DType::f32;
  fill_init(*parameter, init, context.seed);
  parameter->value.grad_ref.leaf = &parameter->leaf;
  parameters_.push_back(std::move(parameter));
  entries_.push_back({Entry::parameter, parameters_.size() - 1});
  return *parameters_.back();
}

Buffer& Module::add_buffer(const BuildContext& context, const std::string& name, const Tensor& value) {
  buffers_.push_back(std::make_unique<Buffer>(Buffer{context.prefix + name, value}));
  entries_.push_back({Entry::buffer, buffers_.size() - 1});
  return *buffers_.back();
}

}  // namespace shoal
