#include "core/nn/module.h"

#include <algorithm>

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

AxisCoord part_of(const ShardedDim& sharded, const AxisCoords& coords) {
  const AxisCoord coord = coords[sharded.axis];
  if (sharded.max_parts == 0 || coord.size <= sharded.max_parts) return sharded.within ? AxisCoord{} : coord;
  SHOAL_CHECK(coord.size % sharded.max_parts == 0, "placement: ", axis_name(sharded.axis), " = ", coord.size,
              " is no multiple of the ", sharded.max_parts, " parts of a parameter");
  const int each = coord.size / sharded.max_parts;  // ranks with the same part
  return sharded.within ? AxisCoord{coord.index % each, each}
                        : AxisCoord{coord.index / each, sharded.max_parts};
}

Box Box::whole(const Shape& shape) {
  Box box{shape, shape};
  for (int d = 0; d < shape.dims(); d++) box.start.set(d, 0);
  return box;
}

Box box_of(const Shape& global_shape, const Placement& placement, const AxisCoords& coords) {
  Box box = Box::whole(global_shape);
  for (const ShardedDim& sharded : placement.sharded) {
    if (sharded.dim < 0) continue;
    const ShardRange range = shard_range(global_shape[sharded.dim], part_of(sharded, coords));
    box.start.set(sharded.dim, range.begin);
    box.extent.set(sharded.dim, range.end - range.begin);
  }
  return box;
}

namespace {

/// The index in the global tensor of element `i` of a piece of it.
int64_t global_index(const Shape& global_shape, const Box& box, int64_t i) {
  int64_t index = 0, stride = 1;
  for (int d = global_shape.dims() - 1; d >= 0; d--) {
    index += (box.start[d] + i % box.extent[d]) * stride;
    i /= box.extent[d];
    stride *= global_shape[d];
  }
  return index;
}

}  // namespace

Tensor Parameter::own_value() const {
  return piece ? piece_value : value.flat(0, value.numel());
}

Tensor Parameter::own_grad() const {
  if (piece) return piece_grad;
  return leaf.grad.defined() ? leaf.grad.flat(0, value.numel()) : Tensor{};
}

void fill_init(const Parameter& parameter, const Init& init, uint64_t seed) {
  const Tensor& value = parameter.value;
  SHOAL_CHECK(value.shape() == parameter.box.extent, "fill_init: ", parameter.name, ": shard ", value.shape(),
              " is not the part ", parameter.box.extent, " of the global shape ", parameter.global_shape);
  if (init.kind == Init::Kind::zeros) return value.set_zero();
  // Generated on the host and copied: the bits must not depend on the device.
  const RandomStream random(seed, parameter.name);
  const int dims = value.dims();
  const int64_t run = std::max<int64_t>(1, dims == 0 ? 1 : value.size(dims - 1));  // of neighbours globally
  dispatch_float(value.dtype(), "fill_init", [&]<class T>() {
    std::vector<T> host(static_cast<size_t>(value.numel()), T(1));
    if (init.kind == Init::Kind::normal) {
      parallel_for(value.numel() / run, std::max<int64_t>(1, (1 << 14) / run),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t r = begin; r < end; r++) {
                       const int64_t first = global_index(parameter.global_shape, parameter.box, r * run);
                       for (int64_t i = 0; i < run; i++) {
                         host[static_cast<size_t>(r * run + i)] =
                             static_cast<T>(init.stddev * random.normal(static_cast<uint64_t>(first + i)));
                       }
                     }
                   });
    }
    value.copy_from(Tensor::from(host, value.shape()));
  });
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
  parameter->held = context.held;
  parameter->box = box_of(global_shape, placement, context.coords);
  if (!context.held) {
    parameter->box.start.set(0, 0);
    parameter->box.extent.set(0, 0);
  }
  parameter->value =
      Tensor::empty(context.shapes_only ? Shape{0} : parameter->box.extent, context.dtype, context.device);
  parameter->leaf.grad_dtype = context.dtype == DType::f64 ? DType::f64 : DType::f32;
  if (context.fill_later && context.held) {
    parameter->value.release_memory();
    parameter->fill = [p = parameter.get(), init, seed = context.seed] {
      p->value.allocate_memory();
      fill_init(*p, init, seed);
    };
  } else if (!context.shapes_only) {
    fill_init(*parameter, init, context.seed);
  }
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
