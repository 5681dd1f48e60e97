#include "core/nn/module.h"

#include <cmath>

#include "core/autograd/tape.h"
#include "core/ops/elementwise.h"
#include "tests/support/same_bits.h"

namespace shoal {
namespace {

using testing::same_bits;

TEST(ShardRange, CoversTheSizeWithLargerShardsFirst) {
  for (const int64_t size : {0, 1, 7, 8, 9}) {
    for (const int shards : {1, 2, 3, 8}) {
      int64_t next = 0, previous = size;
      for (int i = 0; i < shards; i++) {
        const ShardRange range = shard_range(size, {i, shards});
        EXPECT_EQ(range.begin, next);
        const int64_t length = range.end - range.begin;
        EXPECT_LE(length, previous);
        EXPECT_TRUE(length == size / shards || length == size / shards + 1);
        previous = length;
        next = range.end;
      }
      EXPECT_EQ(next, size);
    }
  }
}

class Leafy final : public Module {
 public:
  Leafy(const BuildContext& context, const Shape& shape, const Init& init, const Placement& placement) {
    weight = &add_parameter(context, "weight", shape, init, ParamKind::matrix, placement);
  }
  Parameter* weight = nullptr;
};

class Family final : public Module {
 public:
  explicit Family(const BuildContext& context)
      : first(context.child("first"), {2, 3}, Init::normal(1), Placement::replicated()),
        second(context.child("second"), {2, 3}, Init::normal(1), Placement::replicated()) {
    add_parameter(context, "head", {4}, Init::ones(), ParamKind::norm);
    add_module(second);
    add_buffer(context, "bias", Tensor::zeros({2}, DType::f32));
    add_module(first);
    add_parameter(context, "tail", {1}, Init::zeros());
  }
  Leafy first, second;
};

BuildContext context_for(int index, int size, DType dtype = DType::f32) {
  BuildContext context;
  context.seed = 7;
  context.dtype = dtype;
  context.prefix = "model.";
  context.coords[Axis::ep] = context.coords[Axis::tp] = {index, size};
  return context;
}

TEST(Module, ParametersAndBuffersComeInRegistrationOrderWithFullNames) {
  const Family family(context_for(0, 1));
  std::vector<std::string> names;
  for (const Parameter* p : family.parameters()) names.push_back(p->name);
  EXPECT_EQ(names, (std::vector<std::string>{"model.head", "model.second.weight", "model.first.weight",
                                             "model.tail"}));
  ASSERT_EQ(family.buffers().size(), 1U);
  EXPECT_EQ(family.buffers()[0]->name, "model.bias");
}

TEST(Module, ParametersAreLeavesOfTheirOwnGradient) {
  const Family family(context_for(0, 1, DType::f64));
  for (const Parameter* p : family.parameters()) {
    EXPECT_EQ(p->value.grad_ref.leaf, &p->leaf);
    EXPECT_EQ(p->leaf.grad_dtype, DType::f64);
  }
  Tape tape;
  Parameter* head = family.parameters()[0];
  tape.backward(sum(head->value));
  EXPECT_EQ(head->leaf.grad.to_vector<double>(), std::vector<double>(4, 1.0));
}

/// The whole tensor put together from the shards of dimension `dim`.
std::vector<float> gathered(const Shape& shape, int dim, int shards) {
  std::vector<float> whole(static_cast<size_t>(shape.numel()));
  int64_t inner = 1;
  for (int d = dim + 1; d < shape.dims(); d++) inner *= shape[d];
  for (int rank = 0; rank < shards; rank++) {
    const Leafy module(context_for(rank, shards), shape, Init::normal(0.5),
                       Placement{Grid::expert, {ShardedDim{dim, Axis::ep}}});
    const std::vector<float> local = module.weight->value.to_vector<float>();
    const Box& box = module.weight->box;
    const int64_t block = box.extent[dim] * inner;
    for (int64_t i = 0; i < static_cast<int64_t>(local.size()); i++) {
      const int64_t global = (i / block * shape[dim] + box.start[dim]) * inner + i % block;
      whole[static_cast<size_t>(global)] = local[static_cast<size_t>(i)];
    }
  }
  return whole;
}

TEST(FillInit, TP_01_BitsDoNotDependOnTheSharding) {
  const Shape shape{6, 5, 7};
  for (const int dim : {0, 1, 2}) {
    const std::vector<float> whole = gathered(shape, dim, 1);
    for (const int shards : {2, 3, 4, 8}) {
      EXPECT_EQ(gathered(shape, dim, shards), whole) << dim << ' ' << shards;
    }
  }
  const Leafy replicated(context_for(1, 4), shape, Init::normal(0.5), Placement::replicated());
  EXPECT_EQ(replicated.weight->value.to_vector<float>(), gathered(shape, 0, 1));
}

TEST(FillInit, PartsOfTwoDimensionsAndReplicasWithinAnAxisHoldTheSameBits) {
  const Shape shape{6, 5, 7};
  const std::vector<float> whole = gathered(shape, 0, 1);
  const auto expect_part = [&](const AxisCoords& coords, const Placement& placement, const Box& want) {
    BuildContext context = context_for(0, 1);
    context.coords = coords;
    const Leafy module(context, shape, Init::normal(0.5), placement);
    EXPECT_EQ(module.weight->box, want);
    const std::vector<float> local = module.weight->value.to_vector<float>();
    size_t i = 0;
    for (int64_t a = 0; a < want.extent[0]; a++) {
      for (int64_t b = 0; b < want.extent[1]; b++) {
        for (int64_t c = 0; c < want.extent[2]; c++, i++) {
          const int64_t at =
              ((want.start[0] + a) * shape[1] + want.start[1] + b) * shape[2] + want.start[2] + c;
          EXPECT_EQ(local[i], whole[static_cast<size_t>(at)]) << i;
        }
      }
    }
  };
  AxisCoords coords;
  coords[Axis::ep] = {1, 4};
  coords[Axis::etp] = {1, 2};
  expect_part(coords, Placement::expert(2), {{2, 0, 4}, {2, 5, 3}});
  expect_part(coords, Placement::expert(1), {{2, 3, 0}, {2, 2, 7}});
  // Three parts over six ranks: each part is on two.
  for (int rank = 0; rank < 6; rank++) {
    coords[Axis::tp] = {rank, 6};
    expect_part(coords, Placement::tensor(0, 3), {{rank / 2 * 2, 0, 0}, {2, 5, 7}});
  }
}

TEST(FillInit, TP_01_ExpertsDifferFromEachOtherAndFollowTheDeviation) {
  const Leafy module(context_for(0, 1), {8, 40, 50}, Init::normal(0.5), Placement::expert());
  const Tensor& value = module.weight->value;
  EXPECT_NEAR(std::sqrt(sum_squares(value) / static_cast<double>(value.numel())), 0.5, 0.01);
  for (int64_t a = 0; a < 8; a++) {
    for (int64_t b = a + 1; b < 8; b++) EXPECT_FALSE(same_bits(value.rows(a, a + 1), value.rows(b, b + 1)));
  }
}

TEST(FillInit, IsBitEqualForAnyNumberOfThreadsAndDependsOnNameAndSeed) {
  const auto make = [](uint64_t seed, const std::string& prefix) {
    BuildContext context = context_for(0, 1);
    context.seed = seed;
    context.prefix = prefix;
    const Leafy module(context, {300, 301}, Init::normal(1), Placement::replicated());
    return module.weight->value.detach();
  };
  testing::expect_same_for_any_team([&] { return std::vector{make(1, "a.")}; });
  EXPECT_FALSE(same_bits(make(1, "a."), make(2, "a.")));
  EXPECT_FALSE(same_bits(make(1, "a."), make(1, "b.")));
}

TEST(FillInit, F32ValuesAreTheRoundedF64Ones) {
  const Leafy wide(context_for(0, 1, DType::f64), {40}, Init::normal(1), Placement::replicated());
  const Leafy narrow(context_for(0, 1), {40}, Init::normal(1), Placement::replicated());
  const auto w = wide.weight->value.to_vector<double>();
  const auto n = narrow.weight->value.to_vector<float>();
  for (size_t i = 0; i < n.size(); i++) EXPECT_EQ(n[i], static_cast<float>(w[i]));
}

}  // namespace
}  // namespace shoal
