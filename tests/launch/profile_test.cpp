// run.profile: the table, the trace, what it counts, and that it changes nothing.
#include "launch/profile.h"

#include <gtest/gtest.h>

#include <set>

#include "launch/profile_trace.h"
#include "tests/support/error_of.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

using nlohmann::json;

json read_json(const std::filesystem::path& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return json::parse(file);
}

/// Every event lies within the one around it, and begins come in order.
void expect_nested(const json& trace, int rank) {
  struct Open {
    double begin, end;
    std::string name;
  };
  std::vector<Open> open;
  double last = 0;
  int64_t count = 0;
  for (const json& e : trace.at("traceEvents")) {
    EXPECT_EQ(e.at("pid"), rank);
    if (e.at("ph") == "M") continue;
    ASSERT_EQ(e.at("ph"), "X");
    count++;
    const double begin = e.at("ts"), end = begin + e.at("dur").get<double>();
    constexpr double kRounding = 0.0021;  // us: both times are rounded to ns
    EXPECT_GE(begin, last) << e;
    last = begin;
    while (!open.empty() && open.back().end <= begin + kRounding && end > open.back().end + kRounding)
      open.pop_back();
    if (open.empty()) {
      EXPECT_EQ(e.at("name").get<std::string>().substr(0, 5), "step ") << e;
    } else {
      EXPECT_GE(begin, open.back().begin - kRounding) << e;
      EXPECT_LE(end, open.back().end + kRounding) << e << " in " << open.back().name;
    }
    open.push_back({begin, end, e.at("name")});
  }
  EXPECT_GT(count, 50);
}

std::set<std::string> event_names(const json& trace) {
  std::set<std::string> names;
  for (const json& e : trace.at("traceEvents")) names.insert(e.at("name"));
  return names;
}

void expect_rows_sum_to_the_step(const json& profile) {
  double sum = 0, passes = 0;
  for (const json& row : profile.at("sections")) {
    sum += row.at("ms").get<double>();
    passes += row.at("forward_ms").get<double>() + row.at("backward_ms").get<double>();
    EXPECT_GE(row.at("ms").get<double>(), -1e-6) << row;
    EXPECT_LE(row.at("min_ms"), row.at("ms")) << row;
    EXPECT_GE(row.at("max_ms"), row.at("ms")) << row;
  }
  const double step = profile.at("step_ms");
  EXPECT_GT(step, 0);
  EXPECT_NEAR(sum, step, 1e-6 * step);
  EXPECT_LT(passes, step);
}

double total(const json& profile, const char* key) {
  double sum = 0;
  for (const json& row : profile.at("sections")) sum += row.at(key).get<double>();
  return sum;
}

constexpr const char* kTinyModel =
    "layers: 2, hidden_size: 16, heads: 2, moe: {num_experts: 4, top_k: 2, hidden: 8, shared_experts: 1, "
    "first_dense: 1}";

/// One step of the tiny model on 2 sequences of 8 tokens out of 11, observed.
Cost cost_of_a_step(bool bf16, double* flops_by_facts) {
  ConfigErrors errors;
  EngineOptions options;
  options.model = Choice{"transformer", ModelRegistry::instance().make_options("transformer")};
  parse_fields(
      load_yaml_text(std::string("{model: {") + kTinyModel + "}}", "test", errors), "",
      [&](FieldVisitor& v) { v.choice("model", options.model, ModelRegistry::instance(), ""); }, errors);
  errors.throw_if_any();
  options.optimizer = Choice{"adamw", nullptr};
  options.dispatcher = Choice{"local", nullptr};
  options.vocab_size = 11;
  options.seq_len = 8;
  options.bf16 = bf16;
  const Mesh mesh(make_single_communicator(), ParallelLayout{});
  TrainEngine engine(options, mesh);
  ModelBatch batch;
  batch.batch = 2;
  batch.seq = 8;
  std::vector<int32_t> tokens, positions;
  for (int32_t i = 0; i < 16; i++) {
    tokens.push_back(i * 7 % 11);
    positions.push_back(i % 8);
  }
  batch.tokens_T = batch.labels_T = Tensor::from(tokens, {16});
  batch.positions_T = Tensor::from(positions, {16});
  Profiler profiler(1 << 14);
  profiler.start(1);
  engine.step({&batch, 1}, 1e-3);
  profiler.stop();
  *flops_by_facts = 16 * engine.model().facts().flops_per_token();
  Cost cost;
  for (const Profiler::Row& row : profiler.rows()) cost += row.cost;
  return cost;
}

// Multiply-adds of one token, forward: qkv 16 * 48 and out 16 * 16 in 2 layers; dense FFN 3 * 16 * 128;
// router 16 * 4; 2 experts and 1 shared 3 * 16 * 8 each; head 16 * 11. Three such products in all: y, dx,
// dweight.
constexpr double kRouter = 16 * 4;
constexpr double kPerToken = 2 * (16 * 48 + 16 * 16) + 3 * 16 * 128 + kRouter + 3 * (3 * 16 * 8) + 16 * 11;
// Attention: 8 * 9 / 2 pairs per sequence and head, heads of 8; 2 products forward, 5 backward.
constexpr double kPairs = 2.0 * 2 * 2 * 36;  // layers, sequences, heads

TEST(StepProfile, FlopOfAStepAreThoseCountedByHand) {
  double facts = 0;
  const Cost f32 = cost_of_a_step(/*bf16=*/false, &facts);
  EXPECT_EQ(f32.flops, 2 * (16 * 3 * kPerToken + kPairs * 8 * 7));
  EXPECT_EQ(f32.flops_bf16, 0);
  EXPECT_GT(f32.bytes, 0);
  const Cost bf16 = cost_of_a_step(/*bf16=*/true, &facts);
  EXPECT_EQ(bf16.flops, 2 * 16 * 3 * kRouter);  // scores stay f32
  EXPECT_EQ(bf16.all_flops(), f32.flops);
}

// MFU counts what the mathematics needs: S / 2 keys per query instead of (S + 1) / 2, and no second q k^T in
// backward: 6 products instead of 7.
TEST(StepProfile, FlopOfAStepAreThoseOfMfuButForTheDiagonalAndTheScoresMadeTwice) {
  double facts = 0;
  const Cost executed = cost_of_a_step(/*bf16=*/false, &facts);
  const double attention_of_facts = 2 * (2.0 * 2 * 2 * 8 * 8 / 2) * 8 * 6;
  const double attention_executed = attention_of_facts * (9.0 / 8) * (7.0 / 6);
  EXPECT_DOUBLE_EQ(executed.flops - attention_executed, facts - attention_of_facts);
}

TEST(StepProfile, ARunWithItIsBitEqualToOneWithout) {
  for (const std::string precision : {"f32", "bf16"}) {
    const std::vector<std::string> common = {"run.precision=" + precision, "parallel.ep=2",
                                             "data.micro_batch=2", "model.recompute=block", "run.steps=6"};
    TinyRun plain, profiled;
    std::vector<std::string> overrides = common;
    const RunOutcome expected = plain.train(2, overrides);
    overrides.insert(overrides.end(), {"run.profile=3", "run.profile_after=1"});
    const RunOutcome found = profiled.train(2, overrides);
    EXPECT_EQ(found.state, expected.state);
    EXPECT_EQ(found.rows, expected.rows);
    EXPECT_TRUE(std::filesystem::exists(profiled.folder / "tiny/profile/trace-rank1.json"));
    EXPECT_FALSE(std::filesystem::exists(plain.folder / "tiny/profile"));
  }
}

TEST(StepProfile, EveryRankWritesATraceAndTheRowsSumToTheStep) {
  TinyRun run;
  run.train(2, {"run.profile=2", "run.profile_after=2", "parallel.ep=2", "eval.every=3"});
  const std::filesystem::path folder = run.folder / "tiny/profile";
  const json profile = read_json(folder / "profile.json");
  EXPECT_EQ(profile.at("steps"), 2);
  EXPECT_EQ(profile.at("ranks"), 2);
  EXPECT_EQ(profile.at("events_dropped"), 0);
  expect_rows_sum_to_the_step(profile);
  std::map<std::string, json> rows;
  for (const json& row : profile.at("sections")) rows[row.at("name")] = row;
  for (const char* name : {"data",
                           "embedding",
                           "norms",
                           "attention projections",
                           "positions",
                           "attention",
                           "router",
                           "dispatch, combine",
                           "exchange",
                           "experts up",
                           "experts activation",
                           "experts down",
                           "shared expert",
                           "ffn",
                           "head and loss",
                           "gradient reduction",
                           "gradient norm",
                           "optimizer",
                           "log",
                           "evaluation",
                           "checkpoint",
                           "waiting for ranks",
                           "other"}) {
    ASSERT_TRUE(rows.contains(name)) << name;
    if (rows[name].at("name") != kWaitingRow) {
      EXPECT_GT(rows[name].at("ms"), 0) << name;
    }
  }
  EXPECT_EQ(rows.size(), 24U) << profile;  // and: sums and counts
  EXPECT_GT(rows["exchange"].at("collective_bytes"), 0);
  EXPECT_GT(rows["gradient reduction"].at("collective_bytes"), 0);
  EXPECT_EQ(rows["optimizer"].at("forward_ms"), 0);
  EXPECT_GT(rows["experts up"].at("backward_ms"), 0);

  for (int rank = 0; rank < 2; rank++) {
    const json trace = read_json(folder / ("trace-rank" + std::to_string(rank) + ".json"));
    expect_nested(trace, rank);
    const std::set<std::string> names = event_names(trace);
    for (const char* name : {"step 3", "step 4", "forward", "backward", "layer 1", "moe", "experts up",
                             "grouped_gemm_rows", "all_to_all wait", "all_reduce", "optimizer update"}) {
      EXPECT_TRUE(names.contains(name)) << name;
    }
    EXPECT_FALSE(names.contains("step 5"));
  }
  std::ifstream text(folder / "profile.txt");
  const std::string table((std::istreambuf_iterator<char>(text)), {});
  for (const char* part : {"profile    2 steps, ms per step on rank 0 of 2", "% peak", "max rank",
                           "experts up", "GFLOP/s by the model's count"}) {
    EXPECT_NE(table.find(part), std::string::npos) << table;
  }
}

TEST(StepProfile, CountsTheSameWorkOnOneRankAndOnTwoTogether) {
  TinyRun run;
  run.train(1, {"run.profile=1", "run.name=one", "eval.at_end=false", "run.steps=5"});
  run.train(2, {"run.profile=1", "run.name=two", "eval.at_end=false", "run.steps=5", "parallel.ep=1"});
  const json one = read_json(run.folder / "one/profile/profile.json");
  const json two = read_json(run.folder / "two/profile/profile.json");
  EXPECT_EQ(total(one, "flops"), 2 * total(two, "flops"));  // half of the tokens each, and all experts
  EXPECT_GT(total(one, "flops"), 0);
}

TEST(StepProfile, OfAResumedRunBeginsAfterSoManyStepsOfThatStart) {
  TinyRun run;
  run.train(1, {"run.steps=3"});
  run.train(1, {"run.steps=9", "run.profile=2", "run.profile_after=1"});
  const std::set<std::string> names = event_names(read_json(run.folder / "tiny/profile/trace-rank0.json"));
  EXPECT_TRUE(names.contains("step 5") && names.contains("step 6"));
  EXPECT_FALSE(names.contains("step 4") || names.contains("step 7"));
}

TEST(StepProfile, OfARunThatEndsEarlierShowsTheStepsThatWere) {
  TinyRun run;
  run.train(1, {"run.steps=4", "run.profile=100", "run.profile_after=1"});
  const json profile = read_json(run.folder / "tiny/profile/profile.json");
  EXPECT_EQ(profile.at("steps"), 3);
  expect_rows_sum_to_the_step(profile);
}

TEST(StepProfile, ThatNeverBeginsIsSaidAndWritesNothing) {
  TinyRun run;
  ::testing::internal::CaptureStderr();
  log::set_quiet(false);
  run.train(1, {"run.steps=3", "run.profile=1"});
  log::set_quiet(true);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("run.profile: the training ended before step 4 of this start"), std::string::npos)
      << said;
  EXPECT_TRUE(std::filesystem::is_empty(run.folder / "tiny/profile"));
}

TEST(StepProfile, OddNamesAreFine) {
  TinyRun run;
  run.train(1, {"run.name=\"a \\\"b\\\" \\\\ \xC3\xA9 {}\"", "run.steps=2", "run.profile=1",
                "run.profile_after=0"});
  const json trace = read_json(run.folder / "a \"b\" \\ \xC3\xA9 {}/profile/trace-rank0.json");
  EXPECT_EQ(trace.at("traceEvents").at(0).at("args").at("name"), "rank 0 of a \"b\" \\ \xC3\xA9 {}");
  expect_nested(trace, 0);
}

TEST(StepProfile, AFolderThatCannotBeMadeIsRefusedBeforeTheFirstStep) {
  TinyRun run;
  std::filesystem::create_directories(run.folder / "tiny");
  std::ofstream(run.folder / "tiny/profile") << "a file";
  const std::string error = error_of([&] { run.train(1, {"run.profile=1"}); });
  EXPECT_NE(error.find("run.profile: the folder of its files, " + (run.folder / "tiny/profile").string() +
                       ", cannot be created"),
            std::string::npos)
      << error;
}

TEST(StepProfile, AFileThatCannotBeWrittenDoesNotEndTheTraining) {
  TinyRun run;
  std::filesystem::create_directories(run.folder / "tiny/profile/trace-rank0.json/taken");
  ::testing::internal::CaptureStderr();
  log::set_quiet(false);
  const RunOutcome outcome = run.train(1, {"run.profile=1", "run.steps=5"});
  log::set_quiet(true);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(outcome.end, TrainEnd::done);
  EXPECT_NE(said.find("run.profile: "), std::string::npos) << said;
  EXPECT_NE(said.find("trace-rank0.json"), std::string::npos) << said;
}

TEST(StepProfile, ItsStartHasNoMeaningWithoutSteps) {
  TinyRun run;
  const std::string error = error_of(
      [&] { load_train_config_text("data: {text: [a]}\nrun:\n  profile_after: 7\n", "exp.yaml", {}, 1); });
  EXPECT_NE(error.find("config run.profile_after (exp.yaml:3:18): has no meaning with run.profile: 0"),
            std::string::npos)
      << error;
}

// With a clock that is an hour late, the other rank comes after the end of every wait: all of it was waiting
// for that rank, which itself waited for nobody.
TEST(StepProfile, WaitingIsTheTimeUntilTheLastRankHasCome) {
  run_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    const Mesh mesh(world, ParallelLayout{.dp = 2, .edp = 2});
    Profiler profiler(1000);
    profiler.start(1);
    const Tensor x = Tensor::zeros({10}, DType::f32);
    for (int i = 0; i < 3; i++) {
      const ProfileSection section("sum", ProfileSection::kWhole);
      mesh.comm(Axis::dp).all_reduce(x, ReduceOp::sum).wait();
    }
    mesh.comm(Axis::edp).all_reduce(x, ReduceOp::sum).wait();
    profiler.stop();
    std::map<std::string, int64_t> in_waits, waited;
    for (const auto* e = profiler.events_begin(); e != profiler.events_end(); e++) {
      if (e->waits) in_waits[profiler.rows()[profiler.row_of(*e)].name] += e->end_ns - e->begin_ns;
    }
    const int64_t hour = int64_t{3600} * 1'000'000'000;
    const auto times = waited_times(profiler, mesh, world->rank() == 0 ? 0 : hour);
    for (size_t i = 0; i < times.size(); i++) {
      const auto& t = times[i];
      if (t[0] + t[1] + t[2] > 0) waited[profiler.rows()[i].name] = t[0] + t[1] + t[2];
    }
    if (world->rank() == 0) {
      EXPECT_EQ(waited, in_waits);
      EXPECT_EQ(waited.size(), 2U);
    } else {
      EXPECT_TRUE(waited.empty());
    }
  });
}

TEST(StepProfile, OneClockHasNoOffset) {
  run_ranks(3, [](const std::shared_ptr<Communicator>& world) { EXPECT_EQ(clock_offset_ns(*world), 0); });
}

}  // namespace
}  // namespace shoal::testing
