#include "parallel/mesh.h"

#include <gtest/gtest.h>

namespace shoal {
namespace {

std::vector<std::string> problems(const ParallelOptions& options, const LayoutFacts& facts,
                                  const std::string& yaml = "") {
  ConfigErrors errors;
  const ConfigNode origins = yaml.empty() ? ConfigNode{} : load_yaml_text(yaml, "exp.yaml", errors);
  resolve_layout(options, facts, origins, errors);
  return errors.messages();
}

ParallelLayout resolved(const ParallelOptions& options, const LayoutFacts& facts) {
  ConfigErrors errors;
  const ParallelLayout layout = resolve_layout(options, facts, ConfigNode{}, errors);
  errors.throw_if_any();
  return layout;
}

ParallelOptions with_ep(int64_t ep) {
  ParallelOptions options;
  options.ep.value = ep;
  return options;
}

TEST(ResolveLayout, FillsInDpAndEdpFromTheWorld) {
  const LayoutFacts facts{
      .world_size = 8, .model = {.num_experts = 16}, .global_batch = 32, .micro_batch = 2};
  const ParallelLayout layout = resolved(with_ep(4), facts);
  EXPECT_EQ(layout.dp, 8);
  EXPECT_EQ(layout.ep, 4);
  EXPECT_EQ(layout.edp, 2);
  EXPECT_EQ(resolved(with_ep(8), facts).edp, 1);
  EXPECT_EQ(resolved(ParallelOptions{}, facts).edp, 8);
}

TEST(ResolveLayout, AutoEpIsTheLargestDivisorOfExpertsAndRanks) {
  ParallelOptions options;
  options.ep.value.reset();
  auto ep = [&](int world, int64_t experts) {
    return resolved(
               options,
               {.world_size = world, .model = {.num_experts = experts}, .global_batch = 24, .micro_batch = 0})
        .ep;
  };
  EXPECT_EQ(ep(1, 8), 1);
  EXPECT_EQ(ep(2, 8), 2);
  EXPECT_EQ(ep(6, 8), 2);
  EXPECT_EQ(ep(8, 6), 2);
  EXPECT_EQ(ep(4, 0), 1);
}

TEST(ResolveLayout, TheLocalDispatcherAllowsNoExpertParallelism) {
  const LayoutFacts facts{.world_size = 2, .model = {.num_experts = 8}, .global_batch = 8, .micro_batch = 0};
  ParallelOptions options = with_ep(2);
  options.dispatcher.kind = "local";
  const auto found = problems(options, facts, "parallel: {ep: 2, dispatcher: local}");
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0],
            "config parallel.dispatcher (exp.yaml:1:31): local needs ep = 1, got ep = 2; use all_to_all or "
            "set ep: 1");
  options.ep.value.reset();
  EXPECT_EQ(resolved(options, facts).ep, 1);
}

TEST(ResolveLayout, BatchMustDivideByRanksWhenMicroBatchIsAuto) {
  EXPECT_EQ(problems({}, {.world_size = 3, .model = {.num_experts = 0}, .global_batch = 8, .micro_batch = 0})
                .size(),
            1U);
}

TEST(ResolveLayout, PipelineStagesMustFitLayersAndMicroBatches) {
  const auto options = [](int64_t pp, const PipelineOptions& pipeline) {
    ParallelOptions all;
    all.pp = pp;
    all.pipeline = pipeline;
    return all;
  };
  const auto found = [&](int64_t pp, const PipelineOptions& pipeline, int64_t micro_batch = 1) {
    return problems(options(pp, pipeline), {.world_size = 2 * static_cast<int>(pp),
                                            .model = {.layers = 8},
                                            .global_batch = 12,
                                            .micro_batch = micro_batch});
  };
  const std::string key = "config parallel.pipeline.";
  EXPECT_TRUE(found(3, {}).empty());
  EXPECT_TRUE(found(2, {"interleaved", 4, {}}).empty());
  EXPECT_TRUE(found(2, {"1f1b", 1, {0, 8}}).empty());
  EXPECT_EQ(found(9, {}),
            std::vector<std::string>{
                "config parallel.pp (default): pp (9) x virtual_stages (1) = 9 stages are more than "
                "the model's 8 layers; lower pp or virtual_stages, or set parallel.pipeline.layout"});
  EXPECT_EQ(
      found(2, {"1f1b", 2, {}}),
      std::vector<std::string>{key + "virtual_stages (default): 2 stages per rank need schedule: interleaved "
                                     "and pp above 1, got schedule: 1f1b and pp = 2; set virtual_stages: 1"});
  EXPECT_EQ(found(2, {"1f1b", 1, {4, 3, 1}}),
            std::vector<std::string>{
                key + "layout (default): expected the layers of pp (2) x virtual_stages (1) = 2 "
                      "stages, got 3 numbers"});
  EXPECT_EQ(found(2, {"1f1b", 1, {4, 3}}),
            std::vector<std::string>{
                key + "layout (default): expected numbers whose sum is model.layers (8), got 7"});
  EXPECT_EQ(found(3, {"1f1b", 1, {8, 0, 0}}),
            std::vector<std::string>{
                key + "layout (default): stage 1 has no layers; only the first (embedding) and "
                      "the last (head) may have none"});
  EXPECT_EQ(
      found(2, {"interleaved", 1, {}}, 2),
      std::vector<std::string>{
          key +
          "schedule (default): interleaved runs micro-batches in groups of pp (2), got 3 = global_batch "
          "(12) / dp (2) / micro_batch; change data.global_batch or data.micro_batch, or use 1f1b"});
  const ParallelLayout layout = resolved(options(2, {"interleaved", 2, {1, 2, 3, 2}}),
                                         {.world_size = 2, .model = {.layers = 8}, .global_batch = 4});
  EXPECT_EQ(layout.num_stages(), 4);
  EXPECT_EQ(layout.pipeline.layers, (std::vector<int64_t>{1, 2, 3, 2}));
}

TEST(ResolveLayout, MicroBatchesAreAsFewAsKeepAllStagesBusy) {
  ParallelLayout layout;
  EXPECT_EQ(auto_micro_batches(12, layout), 1);
  layout.pp = 4;
  EXPECT_EQ(auto_micro_batches(12, layout), 4);
  EXPECT_EQ(auto_micro_batches(10, layout), 5);
  EXPECT_EQ(auto_micro_batches(7, layout), 7);
  EXPECT_EQ(auto_micro_batches(3, layout), 3);
  layout.pipeline.schedule = PipelineKind::interleaved;
  EXPECT_EQ(auto_micro_batches(24, layout), 4);
  EXPECT_EQ(auto_micro_batches(10, layout), 10);  // which the rules refuse
}

TEST(ResolveLayout, DegreesWhoseProductIsNoNumberAreRefusedLikeOthers) {
  ParallelOptions options;
  options.tp = options.cp = options.pp = int64_t{1} << 20;
  options.dp.value = int64_t{1} << 20;
  const std::vector<std::string> found = problems(options, {.world_size = 6, .global_batch = 6});
  ASSERT_FALSE(found.empty());
  EXPECT_NE(found[0].find("is 1.20893e+24, expected the world size (6)"), std::string::npos) << found[0];
}

TEST(ResolveLayout, TensorParallelRanksMustFitHeadsAndWidths) {
  const auto found = [](int64_t tp, const ModelSizes& model) {
    ParallelOptions options;
    options.tp = tp;
    return problems(options, {.world_size = static_cast<int>(tp), .model = model, .global_batch = 8});
  };
  EXPECT_TRUE(found(3, {.heads = 8, .kv_heads = 4, .narrowest_ffn = 7}).empty());  // shares may be uneven
  EXPECT_TRUE(found(8, {.heads = 8, .kv_heads = 4, .narrowest_ffn = 8}).empty());
  const char* heads =
      "config parallel.tp (default): tp (6) is above the number of key/value heads (4), so it must be a "
      "multiple of it, and that multiple must divide the queries of each (2); lower tp or change "
      "model.kv_heads";
  EXPECT_EQ(found(6, {.heads = 8, .kv_heads = 4}), std::vector<std::string>{heads});
  EXPECT_EQ(found(16, {.heads = 8, .kv_heads = 4}).size(), 1U);  // two queries for four ranks
  const char* width =
      "config parallel.tp (default): tp (8) is above the smallest width of an FFN (6); lower tp";
  EXPECT_EQ(found(8, {.heads = 8, .kv_heads = 8, .narrowest_ffn = 6}), std::vector<std::string>{width});
}

TEST(ResolveLayout, ExpertTensorParallelRanksMustFitTheExperts) {
  const auto found = [](int64_t etp, const ModelSizes& model) {
    ParallelOptions options;
    options.etp = etp;
    return problems(options, {.world_size = static_cast<int>(etp), .model = model, .global_batch = 12});
  };
  EXPECT_TRUE(found(3, {.num_experts = 4, .expert_width = 7}).empty());
  EXPECT_EQ(
      found(4, {.num_experts = 4, .expert_width = 3}),
      std::vector<std::string>{"config parallel.etp (default): etp (4) is above the width of an expert (3); "
                               "lower etp or raise model.moe.hidden"});
  EXPECT_TRUE(found(2, {.num_experts = 4, .expert_width = 64, .width_multiple = 16}).empty());
  EXPECT_EQ(
      found(2, {.num_experts = 4, .expert_width = 48, .width_multiple = 16}),
      std::vector<std::string>{
          "config parallel.etp (default): etp (2) cuts experts of width 48, whose parts must be multiples "
          "of 16 for fp8 products; lower etp, or set model.moe.hidden to 64"});
  EXPECT_EQ(found(2, {}),
            std::vector<std::string>{
                "config parallel.etp (default): etp = 2 but the model has no MoE layer; set etp: 1 or "
                "add a model.moe section"});
  ParallelOptions options;  // ep: auto takes what etp leaves
  options.etp = 2;
  options.ep.value.reset();
  EXPECT_EQ(resolved(options, {.world_size = 4, .model = {.num_experts = 8}, .global_batch = 8}).ep, 2);
}

TEST(ResolveLayout, AnOptimizerOfWholeMatricesNeedsThem) {
  ParallelOptions options;
  LayoutFacts facts{.world_size = 4,
                    .model = {.num_experts = 4, .heads = 4, .kv_heads = 4, .expert_width = 8},
                    .global_batch = 4,
                    .whole_matrices = "muon"};
  EXPECT_TRUE(problems(options, facts).empty());
  options.tp = options.etp = options.zero = 2;
  const std::vector<std::string> found = problems(options, facts);
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(
      found[0],
      "config parallel.tp (default): optimizer muon updates whole matrices, which tp (2) cuts; set tp: 1 or "
      "use another optimizer");
  EXPECT_NE(found[1].find("etp (2) cuts; set etp: 1"), std::string::npos) << found[1];
  EXPECT_NE(found[2].find("zero (2) cuts; set zero: 0"), std::string::npos) << found[2];
  facts.whole_matrices = "";
  EXPECT_TRUE(problems(options, facts).empty());
}

TEST(ResolveLayout, TakesEveryZeroStageAndNoOther) {
  ParallelOptions options;
  for (const int zero : {0, 1, 2, 3}) {
    options.zero = zero;
    EXPECT_EQ(problems(options, {.world_size = 3, .global_batch = 3}), std::vector<std::string>{});
  }
  options.zero = 4;
  EXPECT_EQ(
      problems(options, {}, "parallel: {zero: 4}"),
      std::vector<std::string>{"config parallel.zero (exp.yaml:1:18): zero = 4 is no stage; set it to 0, "
                               "1, 2 or 3"});
}

TEST(ResolveLayout, NamesTheProductThatDoesNotFitTheWorld) {
  ParallelOptions options;
  options.dp.value = 3;
  const auto messages = problems(options, {.world_size = 4, .model = {.num_experts = 0}, .global_batch = 12});
  ASSERT_EQ(messages.size(), 1U);
  EXPECT_EQ(
      messages[0],
      "config parallel.dp (default): dp (3) x tp (1) x cp (1) x pp (1) is 3, expected the world size (4); "
      "set dp: auto or 4, or start 3 ranks");
}

TEST(ResolveLayout, CF_03_ReportsEveryViolatedRuleAtOnce) {
  ParallelOptions options = with_ep(3);
  options.dp.value = 2;
  const auto messages =
      problems(options, {.world_size = 4, .model = {.num_experts = 8}, .global_batch = 7, .micro_batch = 2},
               "parallel: {dp: 2, ep: 3}\ndata: {global_batch: 7}\n");
  ASSERT_EQ(messages.size(), 3U);
  EXPECT_NE(messages[0].find("expected the world size (4)"), std::string::npos) << messages[0];
  EXPECT_NE(messages[1].find("must divide the world size (4)"), std::string::npos) << messages[1];
  EXPECT_EQ(
      messages[2],
      "config data.global_batch (exp.yaml:2:22): expected a multiple of micro_batch (2) x dp (2) = 4, "
      "because accumulation = global_batch / (micro_batch x dp) must be whole; got 7; start a number of "
      "ranks that divides it, or change data.global_batch or data.micro_batch (a run that is resumed "
      "keeps its global_batch)");
}

TEST(ResolveLayout, RefusesExpertParallelismWithoutEnoughExperts) {
  const auto none = problems(with_ep(2), {.world_size = 2, .model = {.num_experts = 0}, .global_batch = 2});
  ASSERT_EQ(none.size(), 1U);
  EXPECT_NE(none[0].find("ep = 2 but the model has no MoE layer"), std::string::npos);
  const auto few = problems(with_ep(4), {.world_size = 4, .model = {.num_experts = 2}, .global_batch = 4});
  ASSERT_EQ(few.size(), 1U);
  EXPECT_NE(few[0].find("expected at most num_experts (2), got 4; lower ep or raise num_experts"),
            std::string::npos);
}

TEST(ResolveLayout, RefusesDegreesBelowOne) {
  ParallelOptions options = with_ep(0);
  options.tp = -1;
  options.dp.value = 0;
  const auto messages = problems(options, {.world_size = 4});
  ASSERT_EQ(messages.size(), 3U);
  EXPECT_NE(messages[0].find("expected a degree >= 1, got -1"), std::string::npos);
}

// EMP-05: a batch that cannot be cut into one part per rank is refused at start, with the numbers.
TEST(ResolveLayout, EMP_05_RefusesFewerSequencesThanRanks) {
  const auto messages = problems(
      with_ep(4), {.world_size = 4, .model = {.num_experts = 8}, .global_batch = 1, .micro_batch = 1});
  ASSERT_EQ(messages.size(), 1U);
  EXPECT_NE(messages[0].find("expected a multiple of micro_batch (1) x dp (4) = 4"), std::string::npos);
}

TEST(ParallelOptions, HasTheAllToAllDispatcherByDefaultAndParses) {
  ParallelOptions options;
  EXPECT_EQ(options.dispatcher.kind, "all_to_all");
  ConfigErrors errors;
  const ConfigNode node =
      load_yaml_text("{dp: 2, ep: 2, dispatcher: {kind: all_gather}, bucket_mb: 0.5}", "exp.yaml", errors);
  parse_fields(
      node, "parallel", [&](FieldVisitor& v) { options.fields(v); }, errors);
  errors.throw_if_any();
  EXPECT_EQ(options.dp.value, 2);
  EXPECT_EQ(options.ep.value, 2);
  EXPECT_EQ(options.dispatcher.kind, "all_gather");
  EXPECT_EQ(options.bucket_mb, 0.5);
}

TEST(Mesh, PutsConsecutiveRanksIntoAnExpertGroup) {
  run_ranks(8, [](const std::shared_ptr<Communicator>& world) {
    ParallelLayout layout;
    layout.dp = 8;
    layout.ep = 4;
    layout.edp = 2;
    const Mesh mesh(world, layout);
    const int rank = world->rank();
    EXPECT_EQ(mesh.coords()[Axis::dp].index, rank);
    EXPECT_EQ(mesh.coords()[Axis::ep].index, rank % 4);
    EXPECT_EQ(mesh.coords()[Axis::ep].size, 4);
    EXPECT_EQ(mesh.coords()[Axis::edp].index, rank / 4);
    EXPECT_EQ(mesh.comm(Axis::ep).size(), 4);
    EXPECT_EQ(mesh.comm(Axis::ep).rank(), rank % 4);
    EXPECT_EQ(mesh.comm(Axis::ep).name(), "ep");
    EXPECT_EQ(mesh.comm(Axis::ep).min(int64_t{rank}), rank / 4 * 4);
    EXPECT_EQ(mesh.comm(Axis::edp).sum(int64_t{rank}), rank % 4 * 2 + 4);
    EXPECT_EQ(mesh.comm(Axis::tp).size(), 1);
    EXPECT_EQ(mesh.comm(Axis::pp).name(), "pp");
    EXPECT_EQ(mesh.tokens().size(), 8);
  });
}

TEST(Mesh, ContextParallelRanksHoldOtherTokensOfTheSameSequences) {
  run_ranks(8, [](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, {.tp = 2, .cp = 2, .dp = 2, .pp = 1, .etp = 1, .ep = 8, .edp = 1});
    const int rank = world->rank();
    EXPECT_EQ(mesh.coords()[Axis::cp].index, rank / 2 % 2);
    EXPECT_EQ(mesh.speaks_for_sequences(), rank / 2 % 2 == 0);
    EXPECT_EQ(mesh.sequences().sum(int64_t{rank}), 2 * (rank % 4) + 4);
    EXPECT_EQ(mesh.tokens().size(), 4);
    EXPECT_EQ(mesh.tokens().sum(int64_t{rank}), 4 * (rank % 2) + 12);
    EXPECT_EQ(mesh.replicas(Placement::tensor(0)).sum(int64_t{rank}), 4 * (rank % 2) + 12);
    EXPECT_EQ(mesh.replicas(Placement::replicated()).size(), 8);
  });
  ParallelOptions options;
  options.cp = 3;
  options.context = "ring";
  const ParallelLayout layout = resolved(options, {.world_size = 6, .global_batch = 2});
  EXPECT_EQ(layout.cp, 3);
  EXPECT_EQ(layout.dp, 2);
  EXPECT_EQ(layout.context, ContextKind::ring);
}

TEST(Mesh, ArrangesBothGridsOverAllAxes) {
  run_ranks(8, [](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, {.tp = 2, .cp = 1, .dp = 2, .pp = 2, .etp = 1, .ep = 4, .edp = 1});
    const int rank = world->rank();
    EXPECT_EQ(mesh.coords()[Axis::tp].index, rank % 2);
    EXPECT_EQ(mesh.coords()[Axis::dp].index, rank / 2 % 2);
    EXPECT_EQ(mesh.coords()[Axis::pp].index, rank / 4);
    EXPECT_EQ(mesh.comm(Axis::dp).sum(int64_t{rank}), 2 * (rank / 4 * 4 + rank % 2) + 2);
    EXPECT_EQ(mesh.comm(Axis::pp).sum(int64_t{rank}), 2 * (rank % 4) + 4);
    EXPECT_EQ(mesh.comm(Axis::ep).max(int64_t{rank}), rank / 4 * 4 + 3);
  });
}

TEST(Mesh, KnowsTheNodesOfAGroup) {
  run_ranks(8, [](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, {.tp = 2, .dp = 4, .etp = 2, .ep = 4, .edp = 1, .ranks_per_node = 4});
    const int node = world->rank() / 4;
    const auto nodes_of = [](const Mesh& m, Axis axis) { return m.comm(axis).traffic().nodes(); };
    EXPECT_EQ(nodes_of(mesh, Axis::tp), std::vector<int>(2, node));
    EXPECT_EQ(nodes_of(mesh, Axis::ep), (std::vector<int>{0, 0, 1, 1}));
    EXPECT_EQ(nodes_of(mesh, Axis::dp), (std::vector<int>{0, 0, 1, 1}));
    const Mesh found(world, {.dp = 8, .ep = 8});  // threads are on one
    EXPECT_EQ(nodes_of(found, Axis::ep), std::vector<int>(8, 0));
  });
}

TEST(ResolveLayout, TheHierarchicalDispatcherNeedsNodesOfEqualSize) {
  ParallelOptions options = with_ep(4);
  options.dispatcher.kind = "hierarchical";
  const LayoutFacts facts{.world_size = 24, .model = {.num_experts = 8}, .global_batch = 24};
  for (const int64_t legal : {1, 2, 4, 8, 12, 24}) {
    options.ranks_per_node.value = legal;
    EXPECT_TRUE(problems(options, facts).empty()) << legal;
  }
  options.ranks_per_node.value = 6;  // ranks 4..7 are on nodes 0 0 1 1, 0..3 on node 0, 8..11 on node 1
  EXPECT_TRUE(problems(options, facts).empty());
  options.ranks_per_node.value = 3;  // ranks 0..3 are on nodes 0 0 0 1
  const auto found = problems(options, facts);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_NE(
      found[0].find("with ranks_per_node (3) the group of ep (4) x etp (1) from rank 0 is on nodes 0 to 1"),
      std::string::npos)
      << found[0];
}

TEST(ResolveLayout, PaddedExpertsNeedADispatcherThatCanSendThem) {
  const LayoutFacts facts{
      .world_size = 2, .model = {.num_experts = 8, .pads_experts = true}, .global_batch = 8};
  for (const char* kind : {"all_to_all", "all_gather", "hierarchical"}) {
    ParallelOptions options = with_ep(2);
    options.dispatcher.kind = kind;
    const auto found = problems(options, facts);
    ASSERT_EQ(found.size(), std::string(kind) == "all_to_all" ? 0U : 1U) << kind;
    for (const std::string& problem : found)
      EXPECT_NE(problem.find("use all_to_all, or local with ep: 1"), std::string::npos) << problem;
  }
}

TEST(ResolveLayout, RanksPerNodeMustDivideTheWorld) {
  ParallelOptions options;
  options.ranks_per_node.value = 3;
  EXPECT_EQ(problems(options, {.world_size = 4, .global_batch = 4}),
            std::vector<std::string>{
                "config parallel.ranks_per_node (default): ranks_per_node (3) must divide the world "
                "size (4); leave it at auto, or start a multiple of 3 ranks"});
  options.ranks_per_node.value = 2;
  EXPECT_EQ(resolved(options, {.world_size = 4, .global_batch = 4}).ranks_per_node, 2);
}

TEST(Mesh, RefusesALayoutThatDoesNotFitTheWorld) {
  EXPECT_THROW(
      Mesh(make_single_communicator(), {.tp = 1, .cp = 1, .dp = 2, .pp = 1, .etp = 1, .ep = 2, .edp = 1}),
      Error);
}

}  // namespace
}  // namespace shoal
