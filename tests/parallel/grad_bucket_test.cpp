#include "parallel/grad_bucket.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/tape.h"
#include "core/nn/module.h"

namespace shoal {
namespace {

/// Parameters of a tiny model: two dense ones and one stack of experts, sharded over ep.
class TinyModel final : public Module {
 public:
  TinyModel(const Mesh& mesh, DType dtype, int64_t num_experts) {
    BuildContext context;
    context.dtype = dtype;
    context.seed = 1;
    context.coords = mesh.coords();
    first = &add_parameter(context, "first", {5, 3}, Init::normal(1));
    experts = &add_parameter(context, "experts", {num_experts, 2, 3}, Init::normal(1), ParamKind::matrix,
                             Placement::expert());
    last = &add_parameter(context, "last", {7}, Init::normal(1));
  }
  Parameter *first, *experts, *last;
};

/// y = sum(parameter), with gradient `scale` everywhere.
struct ScaledSum final : Function {
  explicit ScaledSum(double scale) : scale(scale) {}
  double scale;
  Shape shape;
  const char* name() const override { return "scaled_sum"; }
  Tensor forward(const Tensor& x) {
    shape = x.shape();
    return Tensor::zeros({1}, x.dtype());
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    const Tensor dx = Tensor::empty(shape, dy[0].dtype());
    dispatch_float(dx.dtype(), name(), [&]<class T>() {
      for (int64_t i = 0; i < dx.numel(); i++) dx.data<T>()[i] = static_cast<T>(scale);
    });
    return {dx};
  }
};

ParallelLayout layout_of(int world, int ep) {
  ParallelLayout layout;
  layout.dp = world;
  layout.ep = ep;
  layout.edp = world / ep;
  return layout;
}

void use(Tape& tape, const std::vector<std::pair<Parameter*, double>>& uses) {
  std::vector<Tensor> outputs, seeds;
  for (const auto& [parameter, scale] : uses) {
    outputs.push_back(apply(ScaledSum(scale), parameter->value));
    seeds.push_back(Tensor::zeros({1}, parameter->value.dtype()));
  }
  tape.backward(outputs, seeds);
}

std::vector<float> all_of(const Parameter& p) {
  return p.leaf.grad.to_vector<float>();
}
std::vector<float> constant(const Parameter& p, float value) {
  return std::vector<float>(static_cast<size_t>(p.value.numel()), value);
}

TEST(GradReducer, SumsDenseOverDpAndExpertsOverTheirReplicas) {
  for (const int64_t bucket_bytes : {1, 200, 1 << 20}) {
    run_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
      const Mesh mesh(world, layout_of(4, 2));
      TinyModel model(mesh, DType::f32, 4);
      GradReducer reducer(model.parameters(), mesh, bucket_bytes);
      const int rank = world->rank();
      for (int step = 0; step < 2; step++) {
        reducer.zero();
        {
          Tape tape;
          use(tape, {{model.first, 1}, {model.experts, 10}, {model.last, 100}});  // an earlier micro-batch
        }
        reducer.begin_last_backward();
        Tape tape;
        use(tape, {{model.first, rank}, {model.experts, rank}, {model.last, rank}});
        reducer.finish();
        EXPECT_EQ(all_of(*model.first), constant(*model.first, 4 * 1 + 6));
        EXPECT_EQ(all_of(*model.last), constant(*model.last, 4 * 100 + 6));
        EXPECT_EQ(all_of(*model.experts),
                  constant(*model.experts, 2 * 10 + static_cast<float>(rank % 2 == 0 ? 0 + 2 : 1 + 3)));
      }
    });
  }
}

TEST(GradReducer, FillsBucketsFromTheLastParameterUpToTheirSize) {
  run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, layout_of(2, 1));
    TinyModel model(mesh, DType::f32, 2);
    // Padded to 16 elements each: last 64 bytes, experts 64 bytes, first 64 bytes.
    const GradReducer one_each(model.parameters(), mesh, 1);
    EXPECT_EQ(one_each.num_buckets(), 3);
    EXPECT_EQ(one_each.reduced_bytes(), 192);
    const GradReducer shared(model.parameters(), mesh, 128);
    EXPECT_EQ(shared.num_buckets(), 2) << "dense and expert gradients have different groups";
    EXPECT_THROW(GradReducer(model.parameters(), mesh, 0), Error);
  });
}

// EMP-09: one order of reductions on all ranks, whatever becomes ready first.
TEST(GradReducer, EMP_09_RanksThatFinishGradientsInDifferentOrdersReduceInOne) {
  run_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, layout_of(4, 1));
    TinyModel model(mesh, DType::f32, 2);
    GradReducer reducer(model.parameters(), mesh, 1);
    reducer.begin_last_backward();
    Tape tape;
    if (world->rank() % 2 == 0)
      use(tape, {{model.first, 1}, {model.experts, 10}, {model.last, 100}});
    else
      use(tape, {{model.last, 100}, {model.experts, 10}, {model.first, 1}});
    reducer.finish();
    EXPECT_EQ(all_of(*model.first), constant(*model.first, 4));
    EXPECT_EQ(all_of(*model.experts), constant(*model.experts, 40));
    EXPECT_EQ(all_of(*model.last), constant(*model.last, 400));
  });
}

TEST(GradReducer, SendsNothingOnOneRank) {
  const Mesh mesh(make_single_communicator(), layout_of(1, 1));
  TinyModel model(mesh, DType::f64, 2);
  GradReducer reducer(model.parameters(), mesh, 1 << 20);
  EXPECT_EQ(reducer.reduced_bytes(), 0);
  reducer.begin_last_backward();
  Tape tape;
  use(tape, {{model.last, 2.5}});
  reducer.finish();
  EXPECT_EQ(model.last->leaf.grad.to_vector<double>(), std::vector<double>(7, 2.5));
  EXPECT_EQ(model.last->leaf.grad.dtype(), DType::f64);
}

// EMP-03: an expert (or any parameter) that only some replicas use is still reduced by all.
TEST(GradReducer, EMP_03_ReplicasWithoutAGradientJoinWithZeros) {
  run_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, layout_of(4, 2));
    TinyModel model(mesh, DType::f32, 2);
    GradReducer reducer(model.parameters(), mesh, 1);
    reducer.begin_last_backward();
    Tape tape;
    // Rank 0 uses its expert, its replica rank 2 does not; rank 3 uses nothing at all.
    if (world->rank() == 0) use(tape, {{model.first, 1}, {model.experts, 5}, {model.last, 1}});
    if (world->rank() == 1) use(tape, {{model.last, 1}, {model.first, 1}});
    if (world->rank() == 2) use(tape, {{model.first, 1}});
    reducer.finish();
    EXPECT_EQ(all_of(*model.experts), constant(*model.experts, world->rank() % 2 == 0 ? 5 : 0));
    EXPECT_EQ(all_of(*model.first), constant(*model.first, 3));
    EXPECT_EQ(all_of(*model.last), constant(*model.last, 2));
  });
}

// GS-07: the copies of one expert get the same bits, so they cannot drift apart.
TEST(GradReducer, GS_07_ReplicasOfAnExpertStayBitEqual) {
  run_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, layout_of(4, 2));
    TinyModel model(mesh, DType::f32, 2);
    GradReducer reducer(model.parameters(), mesh, 1 << 20);
    Communicator& replicas = mesh.comm(Axis::edp);
    for (int step = 0; step < 3; step++) {
      reducer.zero();
      reducer.begin_last_backward();
      Tape tape;
      use(tape, {{model.experts, 0.1 * (world->rank() + 1) + step}});
      reducer.finish();
      for (int64_t i = 0; i < model.experts->value.numel(); i++)
        model.experts->value.data<float>()[i] -= 0.01F * model.experts->leaf.grad.data<float>()[i];
      const Tensor both = Tensor::empty({2, model.experts->value.numel()}, DType::f32);
      replicas.all_gather(model.experts->value.view({model.experts->value.numel()}), both).wait();
      EXPECT_EQ(both.rows(0, 1).to_vector<float>(), both.rows(1, 2).to_vector<float>());
    }
  });
}

TEST(GradReducer, RefusesASecondBackwardAfterTheLast) {
  const Mesh mesh(make_single_communicator(), layout_of(1, 1));
  TinyModel model(mesh, DType::f32, 2);
  GradReducer reducer(model.parameters(), mesh, 1 << 20);
  reducer.begin_last_backward();
  {
    Tape tape;
    use(tape, {{model.last, 1}});
  }
  Tape tape;
  try {
    use(tape, {{model.last, 1}});
    FAIL() << "expected an error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("the gradient of last was already reduced"), std::string::npos);
  }
}

TEST(GradReducer, CountsATiedParameterOnce) {
  run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, layout_of(2, 1));
    TinyModel model(mesh, DType::f32, 2);
    GradReducer reducer(model.parameters(), mesh, 1);
    reducer.begin_last_backward();
    Tape tape;
    use(tape, {{model.first, 1}, {model.last, 1}, {model.first, 2}});
    reducer.finish();
    EXPECT_EQ(all_of(*model.first), constant(*model.first, 6));
  });
}

TEST(GradReducer, TakesItsHooksWithIt) {
  const Mesh mesh(make_single_communicator(), layout_of(1, 1));
  TinyModel model(mesh, DType::f32, 2);
  {
    GradReducer reducer(model.parameters(), mesh, 1 << 20);
    reducer.begin_last_backward();
  }
  Tape tape;
  use(tape, {{model.last, 3}});
  EXPECT_EQ(all_of(*model.last), constant(*model.last, 3));
}

void set_grad(Parameter& p, const std::vector<float>& values) {
  p.leaf.grad = Tensor::zeros(p.value.shape(), DType::f32);
  for (size_t i = 0; i < values.size(); i++) p.leaf.grad.data<float>()[i] = values[i];
}

// CN-01: rank 0 owns experts with square sum 20, rank 1 with 100, dense 0: norm 10.954 on every rank.
TEST(GlobalGradSquareSum, CN_01_AddsTheExpertsOfAllRanksOnce) {
  for (const int world_size : {2, 4}) {
    run_ranks(world_size, [&](const std::shared_ptr<Communicator>& world) {
      const Mesh mesh(world, layout_of(world_size, 2));
      TinyModel model(mesh, DType::f32, 2);
      set_grad(*model.first, {});
      set_grad(*model.last, {});
      if (mesh.coords()[Axis::ep].index == 0) {
        set_grad(*model.experts, {2, 4});
      } else {
        set_grad(*model.experts, {6, 8});
      }
      EXPECT_NEAR(std::sqrt(global_grad_square_sum(model.parameters(), mesh)), 10.954, 5e-4);
    });
  }
}

// CN-03: 4 dense entries of 3 and 4 expert entries of 4 -> 10, not 6.
TEST(GlobalGradSquareSum, CN_03_CountsDenseAndExperts) {
  for (const int ep : {1, 2}) {
    run_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      const Mesh mesh(world, layout_of(2, ep));
      TinyModel model(mesh, DType::f32, 2);
      set_grad(*model.first, {3, 3, 3, 3});
      set_grad(*model.last, {});
      set_grad(*model.experts, ep == 1 ? std::vector<float>{4, 4, 4, 4} : std::vector<float>{4, 4});
      EXPECT_DOUBLE_EQ(std::sqrt(global_grad_square_sum(model.parameters(), mesh)), 10.0);
    });
  }
}

// CN-07: a rank whose experts have no gradient at all takes part like the others.
TEST(GlobalGradSquareSum, CN_07_ARankWithUnusedExpertsGetsTheSameNorm) {
  run_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, layout_of(4, 4));
    TinyModel model(mesh, DType::f32, 4);
    set_grad(*model.first, {0.1F, 0.7F});
    set_grad(*model.last, {0.3F});
    if (world->rank() != 2) set_grad(*model.experts, {0.1F * static_cast<float>(world->rank() + 1)});
    const double norm = global_grad_square_sum(model.parameters(), mesh);
    EXPECT_NEAR(norm, 0.01 + 0.49 + 0.09 + 0.01 + 0.04 + 0.16, 1e-6);
    const Tensor all = Tensor::empty({4}, DType::f64);
    world->all_gather(Tensor::from(std::vector<double>{norm}, {1}), all).wait();
    for (const double other : all.to_vector<double>()) EXPECT_EQ(other, norm);
  });
}

}  // namespace
}  // namespace shoal
