#include "launch/replica_check.h"

#include "tests/support/error_of.h"
#include "tests/support/parity.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

TEST(ReplicaCheck, NamesTheTensorAndTheRanksThatDiffer) {
  run_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    ParallelLayout layout;
    layout.dp = layout.tp = layout.ep = layout.edp = 2;
    const Mesh mesh(world, layout);
    TrainEngine engine(parity_engine({}), mesh);
    EXPECT_EQ(replica_problem(engine.state(), *world), "");
    const auto parameter = [&](const std::string& name) {
      return *std::ranges::find(engine.parameters(), name, &Parameter::name);
    };
    // One bit of a copy of a norm, and of a copy of rank 1's and 3's part of a matrix.
    const auto flip = [&](const Tensor& value) { value.bytes()[3] ^= std::byte{1}; };
    if (world->rank() == 2) flip(parameter("final_norm.weight")->value);
    if (world->rank() == 3) flip(parameter("layers.0.ffn.w1")->value);
    const std::string problem = replica_problem(engine.state(), *world);
    EXPECT_EQ(problem.find("final_norm.weight"), problem.rfind("final_norm.weight")) << problem;
    EXPECT_NE(problem.find("final_norm.weight"), std::string::npos) << problem;
    EXPECT_NE(problem.find("ranks 0, 1, 3 hold "), std::string::npos) << problem;
    EXPECT_NE(problem.find("rank 2 holds "), std::string::npos) << problem;
    EXPECT_NE(problem.find("layers.0.ffn.w1"), std::string::npos) << problem;
    EXPECT_NE(problem.find("rank 1 holds "), std::string::npos) << problem;
    EXPECT_NE(problem.find("rank 3 holds "), std::string::npos) << problem;
    EXPECT_EQ(problem.find("attention"), std::string::npos) << problem;
  });
}

TEST(ReplicaCheck, RanksMayHoldDifferentTensors) {
  run_ranks(3, [](const std::shared_ptr<Communicator>& world) {
    const int rank = world->rank();
    const auto tensor = [&](const std::string& name, float value) {
      return StateTensor{name, Tensor::from(std::vector<float>{value}, {1}), {1}, Box::whole({1}), rank, 3};
    };
    std::vector<StateTensor> state = {tensor("all", 1)};
    if (rank > 0) state.push_back(tensor("late", 2));
    EXPECT_EQ(replica_problem(state, *world), "");
    if (rank > 0) state.push_back(tensor("last", static_cast<float>(rank)));
    EXPECT_TRUE(replica_problem(state, *world).starts_with("last: rank "));
    state.clear();
    for (int i = 0; i < 20; i++) state.push_back(tensor(str("t", i), rank == 2 ? 1 : 0));
    const std::string many = replica_problem(state, *world);
    EXPECT_TRUE(many.starts_with("t0: ")) << many;
    EXPECT_TRUE(many.ends_with("; and 12 more")) << many;
  });
}

TEST(ReplicaCheck, RunsThatAreCheckedEndAsOthersAndACopyThatDiffersEndsTheRun) {
  TinyRun plain, checked;
  const RunOutcome want = plain.train(4, {"parallel.tp=2", "parallel.ep=2"});
  EXPECT_EQ(checked.train(4, {"parallel.tp=2", "parallel.ep=2", "run.check_replicas=2"}).state, want.state);
  TinyRun divided;  // pieces of a tied embedding's state lie on both ends of a pipeline
  divided.train(8, {"parallel.tp=2", "parallel.pp=2", "parallel.zero=1", "run.check_replicas=1"});
  TinyRun gathered;  // so do pieces of its values
  gathered.train(8, {"parallel.tp=2", "parallel.pp=2", "parallel.zero=3", "run.check_replicas=1"});
  TinyRun broken;
  const std::string error = error_of([&] {
    run_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      Trainer trainer(load_train_config_text(broken.yaml(), "tiny.yaml",
                                             {"run.check_replicas=3", "checkpoint.every=0"}, 2),
                      world);
      // From the start: gradients are summed, so the copies stay apart.
      if (world->rank() == 1) trainer.engine().parameters().front()->value.data<float>()[0] += 0.5F;
      trainer.run();
    });
  });
  EXPECT_NE(error.find("replicas differ after step 3: model/"), std::string::npos) << error;
  EXPECT_NE(error.find("there is no earlier checkpoint"), std::string::npos) << error;
}

}  // namespace
}  // namespace shoal::testing
