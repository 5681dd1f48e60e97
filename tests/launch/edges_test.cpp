// Odd sizes, layouts and settings through the whole program: each works or is refused with a clear text.
// Ranks are threads.
#include <algorithm>
#include <chrono>

#include "core/base/threads.h"
#include "launch/command_support.h"
#include "launch/trainer.h"
#include "parallel/checked_communicator.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

using Settings = std::vector<std::string>;

std::string text_of(const Settings& settings) {
  std::string out;
  for (const std::string& s : settings) out += s + " ";
  return out;
}

struct Refused {
  int ranks;
  Settings settings;
  std::vector<std::string> parts;  // of the message
};

/// Trains, which must end as a UsageError whose message has all parts.
void expect_refused(TinyRun& run, const Refused& c) {
  try {
    run.train(c.ranks, c.settings);
    ADD_FAILURE() << text_of(c.settings) << "was accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ExitCode::usage) << text_of(c.settings) << e.what();
    for (const std::string& part : c.parts) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos)
          << "no '" << part << "' for " << text_of(c.settings) << "in\n"
          << e.what();
    }
  }
}

TEST(Edges, CF_03_LayoutsThatDoNotFitAreRefusedWithBothNumbers) {
  TinyRun run;
  const std::vector<Refused> cases = {
      {3, {}, {"data.global_batch", "dp (3)", "got 8"}},
      {5, {"data.global_batch=3"}, {"data.global_batch", "dp (5)", "got 3"}},
      {2, {"data.micro_batch=3"}, {"data.global_batch", "micro_batch (3) x dp (2)"}},
      {2, {"parallel.ep=4"}, {"parallel.ep (command line)", "must divide the world size (2)"}},
      {4, {"parallel.ep=3"}, {"parallel.ep", "world size (4)", "must divide"}},
      {5,
       {"parallel.ep=5", "data.global_batch=5"},
       {"parallel.ep", "expected at most num_experts (4), got 5"}},
      {2, {"parallel.ep=2", "model.moe.num_experts=0", "model.moe.shared_experts=0"}, {"no MoE layer"}},
      {2, {"parallel.dp=4"}, {"parallel.dp", "expected the world size (2)"}},
      {2, {"parallel.ep=2", "parallel.dispatcher=local"}, {"parallel.dispatcher", "local needs ep = 1"}},
      {3, {"parallel.cp=2"}, {"parallel", "cp (2)", "expected the world size (3)"}},
  };
  for (const Refused& c : cases) expect_refused(run, c);
}

TEST(Edges, CF_05_SizesThatCannotWorkAreRefused) {
  TinyRun run;
  const std::vector<Refused> cases = {
      {1, {"model.layers=0"}, {"model.layers (command line)", "expected 1..", "got 0"}},
      {1, {"model.moe.top_k=5"}, {"model.moe.top_k", "expected 1..num_experts (4), got 5"}},
      {1, {"model.moe={num_experts: 100, top_k: 65}"}, {"model.moe.router", "at most 64, got 65"}},
      {1, {"model.moe.top_k=0"}, {"model.moe.top_k", "got 0"}},
      {1, {"model.moe.num_experts=1"}, {"model.moe.top_k", "expected 1..num_experts (1), got 2"}},
      {1, {"model.moe.first_dense=2"}, {"model.moe", "no layer is an MoE layer"}},
      {1, {"model.moe.layers=[2]"}, {"model.moe.layers", "0..1", "got 2"}},
      {1, {"model.moe.capacity_factor=-1"}, {"model.moe.capacity_factor", "got -1"}},
      {1,
       {"model.moe.expert_precision=fp8", "model.moe.hidden=24"},
       {"model.moe.expert_precision (command line)", "multiples of 16, got moe.hidden 24; set it to 32"}},
      {1,
       {"model.moe.expert_precision=fp8_block", "model.hidden_size=24", "model.heads=2"},
       {"model.moe.expert_precision", "got hidden_size 24; set it to 32 or use same"}},
      {1,
       {"model.moe.expert_precision=fp8", "model.moe.hidden=16", "run.precision=f64"},
       {"model.moe.expert_precision", "expected same with run.precision: f64"}},
      {1,
       {"model.moe.expert_precision=fp8", "model.moe.num_experts=0", "model.moe.shared_experts=0"},
       {"model.moe.expert_precision", "expected same without MoE layers"}},
      {1, {"model.moe.expert_precision=e4m3"}, {"model.moe.expert_precision", "same | fp8 | fp8_block"}},
      {1, {"data.seq_len=0"}, {"data.seq_len", "got 0"}},
      {1, {"data.global_batch=0"}, {"data.global_batch", "got 0"}},
      {1, {"data.micro_batch=0"}, {"data.micro_batch", "got 0"}},
      {1, {"run.steps=-1"}, {"run.steps", "got -1"}},
      {1, {"run.seed=-1"}, {"run.seed", "got -1"}},
      {1, {"run.seed=9223372036854775808"}, {"run.seed", "9223372036854775808"}},
      {1, {"data.loader.seed=-1"}, {"data.loader.seed", "got -1"}},
      {1, {"run.threads=0"}, {"run.threads", "got 0"}},
      {1, {"run.threads=1025"}, {"run.threads", "got 1025"}},
      {1, {"run.log_every=0"}, {"run.log_every", "got 0"}},
      {1, {"optim.learning_rate=0"}, {"optim.learning_rate", "got 0"}},
      {1, {"optim.clip_norm=-1"}, {"optim.clip_norm", "got -1"}},
      {1, {"optim.schedule.warmup_steps=-1"}, {"optim.schedule.warmup_steps", "got -1"}},
      {1, {"checkpoint.every=-1"}, {"checkpoint.every", "got -1"}},
      {1, {"eval.samples=-1"}, {"eval.samples", "got -1"}},
      {1, {"data.split.val_fraction=1"}, {"val_fraction"}},
  };
  for (const Refused& c : cases) expect_refused(run, c);
  EXPECT_FALSE(std::filesystem::exists(run.folder / "tiny")) << "a refused config left something behind";
}

TEST(Edges, DataThatDoesNotFitTheModelIsRefusedOnEveryRank) {
  TinyRun run;
  for (const int ranks : {1, 2}) {
    expect_refused(
        run, {ranks, {"model.vocab_size=100"}, {"model.vocab_size", "at least the tokenizer's", "got 100"}});
    expect_refused(run, {ranks,
                         {"data.seq_len=40000", "data.global_batch=2"},
                         {"one sample needs 40001 tokens", "shorter sequence"}});
    expect_refused(run,
                   {ranks, {"data.split={split: tail, val_fraction: 1e-9}"}, {"one sample needs 17 tokens"}});
    expect_refused(run,
                   {ranks, {"data.split={split: tail, val_fraction: 1e-4}"}, {"one sample needs 17 tokens"}});
  }
  // Tokens of another vocabulary in the prepared data: 16-bit ids.
  run.train(1, {"run.steps=1"});
  const auto bin = run.folder / "data" / "tiny" / "tokens.bin";
  std::vector<uint16_t> ids(std::filesystem::file_size(bin) / 2, 900);
  std::ofstream(bin, std::ios::binary)
      .write(reinterpret_cast<const char*>(ids.data()), static_cast<std::streamsize>(ids.size() * 2));
  const Settings other = {str("data.sources=[{path: ", (run.folder / "data" / "tiny").string(), "}]"),
                          "data.text=[]", "run.name=other"};
  for (const int ranks : {1, 2})
    expect_refused(run, {ranks, other, {"tokens.bin or .idx is not the file that was prepared"}});
  // Without its description the folder counts as made elsewhere, and the ids are checked as they are read.
  std::filesystem::remove(run.folder / "data" / "tiny" / "dataset.json");
  for (const int ranks : {1, 2}) expect_refused(run, {ranks, other, {"900", "another tokenizer"}});
}

// Several settings in one run where they do not touch each other: every run costs its start.
TEST(Edges, OddSizesTrainAndStayFinite) {
  const std::vector<Settings> cases = {
      {"model.vocab_size=1000", "model.moe.top_k=4", "run.seed=0", "optim.clip_norm=0", "checkpoint.every=0"},
      {"data.global_batch=2", "data.seq_len=1", "eval.samples=1", "optim.schedule.warmup_steps=1000"},
      {"data.global_batch=2", "data.micro_batch=1", "model.moe.num_experts=1", "model.moe.top_k=1",
       "checkpoint.every=1000", "optim.clip_norm=1e-300"},
      {"model.layers=1", "model.moe.first_dense=0", "eval.samples=0", "run.seed=9223372036854775807",
       "data.loader.seed=9223372036854775807", "checkpoint.keep_every=1000"},
      {"model.moe.capacity_factor=1e-9", "run.log_every=1000", "data.loader.sampling=random_offset"},
      {"model.moe.capacity_factor=1e6", "parallel.bucket_mb=1e-4", "model.heads=8",
       "data.split.val_fraction=0"},
      {"model.moe.shared_experts=0", "model.moe.hidden=1"},
  };
  for (const Settings& settings : cases) {
    TinyRun run;
    Settings all = settings;
    all.insert(all.end(), {"run.steps=2", "parallel.ep=auto"});
    const RunOutcome outcome = run.train(2, all);
    EXPECT_EQ(outcome.end, TrainEnd::done) << text_of(all);
    EXPECT_TRUE(std::filesystem::exists(run.checkpoint(2))) << text_of(all);
    ASSERT_FALSE(outcome.rows.empty()) << text_of(all);
    for (const auto& row : outcome.rows) {
      EXPECT_TRUE(row["loss"].is_number()) << text_of(all) << row;
      EXPECT_TRUE(row["kind"] == "eval" || row["skipped"] == 0) << text_of(all) << row;
    }
  }
}

TEST(Edges, OneSequenceOfOneTokenTrains) {
  TinyRun run;
  const RunOutcome outcome = run.train(1, {"data.global_batch=1", "data.seq_len=1", "run.steps=3"});
  EXPECT_EQ(outcome.end, TrainEnd::done);
  EXPECT_EQ(outcome.rows[2]["tokens"], 3);
}

/// Runs of one model and batch under several layouts must leave the same state as one rank.
void expect_same_as_one_rank(const Settings& settings,
                             const std::vector<std::pair<int, std::string>>& layouts) {
  auto state_of = [&](int ranks, const std::string& ep) {
    TinyRun run;
    Settings all = settings;
    all.insert(all.end(), {"run.precision=f64", "run.steps=2", "checkpoint.every=0", "eval.samples=3",
                           "optim={learning_rate: 0.1, optimizer: sgd}", "parallel.ep=" + ep});
    return run.train(ranks, all);
  };
  const RunOutcome one = state_of(1, "1");
  for (const auto& [ranks, ep] : layouts) {
    const RunOutcome other = state_of(ranks, ep);
    ASSERT_EQ(one.state.size(), other.state.size());
    for (const auto& [name, values] : one.state)
      EXPECT_TRUE(close(other.state.at(name), values, {1e-9, 1e-11}))
          << name << " on " << ranks << ", ep " << ep;
    EXPECT_NEAR(one.rows.back()["loss"], other.rows.back()["loss"], 1e-10) << ranks << ", ep " << ep;
  }
}

TEST(Edges, ThreeFiveAndSevenRanksTrainLikeOne) {
  expect_same_as_one_rank(
      {"data.global_batch=105", "data.seq_len=2", "model.moe.num_experts=105", "model.moe.hidden=2"},
      {{3, "1"}, {3, "3"}, {5, "5"}, {7, "auto"}});
}

TEST(Edges, EMP_05_OneTokenPerRankTrainsLikeOneRank) {
  expect_same_as_one_rank({"data.global_batch=3", "data.seq_len=1", "model.moe.num_experts=3"},
                          {{3, "1"}, {3, "3"}});
  expect_same_as_one_rank({"data.global_batch=4", "data.seq_len=1"}, {{4, "4"}, {4, "2"}});
}

TEST(Edges, AutomaticExpertParallelismTakesWhatDividesBoth) {
  TinyRun run;
  EXPECT_EQ(run.train(3, {"data.global_batch=3", "parallel.ep=auto", "run.steps=1"}).end, TrainEnd::done);
}

TEST(Edges, HugeCapacityIsNoCapacityAndATinyOneDrops) {
  TinyRun off, huge, tiny;
  const Settings short_run = {"run.steps=3"};
  const RunOutcome a = off.train(1, short_run);
  const RunOutcome b = huge.train(1, {"run.steps=3", "model.moe.capacity_factor=1e6"});
  EXPECT_EQ(a.state, b.state);
  EXPECT_EQ(b.rows[0]["dropped"], 0);
  const RunOutcome c = tiny.train(1, {"run.steps=3", "model.moe.capacity_factor=1e-9"});
  EXPECT_GT(c.rows[0]["dropped"], 0);
}

TEST(Edges, ARankWithoutAnyLabelChangesNothing) {
  // One letter per document: with document masking no token has a label, except in the rows of the long one.
  TinyRun run;
  std::ofstream lines(run.folder / "mixed.jsonl");
  for (int i = 0; i < 800; i++) {
    const bool text = i % 200 == 17;
    lines << "{\"text\": \"" << (text ? "the cat sees a dog and likes it" : "a") << "\"}\n";
  }
  lines.close();
  std::vector<RunOutcome> outcomes;
  for (const int ranks : {1, 4}) {
    outcomes.push_back(run.train(
        ranks, {str("data.text=[", (run.folder / "mixed.jsonl").string(), "]"), "data.documents=jsonl",
                "data.tokenizer=char", "data.loader={mask_documents: true, sampling: sequential}",
                "data.split.val_fraction=0", "data.global_batch=4", str("run.name=ranks", ranks),
                "run.precision=f64", "optim={learning_rate: 0.1, optimizer: sgd}", "checkpoint.every=0"}));
    EXPECT_EQ(outcomes.back().end, TrainEnd::done);
  }
  const int skipped = outcomes[0].rows.back()["skipped"];
  EXPECT_GT(skipped, 0) << "some steps have no label at all";
  EXPECT_LT(skipped, 9) << "others have some";
  EXPECT_EQ(outcomes[1].rows.back()["skipped"], skipped);
  for (const auto& [name, values] : outcomes[0].state)
    EXPECT_TRUE(close(outcomes[1].state.at(name), values, {1e-9, 1e-11})) << name;
}

TEST(Edges, RS_11_FewerStepsThanTheRunHasLeaveItAsItIs) {
  TinyRun run;
  const RunOutcome six = run.train(1, {"run.steps=6"});
  for (const char* steps : {"run.steps=0", "run.steps=3", "run.steps=6"}) {
    const RunOutcome again = run.train(1, {steps});
    EXPECT_EQ(again.end, TrainEnd::already_done) << steps;
    EXPECT_EQ(again.state, six.state) << steps;
    EXPECT_EQ(again.rows, six.rows) << steps;
  }
}

TEST(Edges, ARunOfNoStepsIsAStartLikeAnyOther) {
  TinyRun twice, once;
  const Settings flat = {"run.steps=3", "optim.schedule=constant"};
  twice.train(1, {"run.steps=0", "optim.schedule=constant"});
  EXPECT_EQ(twice.train(1, flat).state, once.train(1, flat).state);
}

TEST(Edges, MP_03_ThreadsAreTheCoresOfTheHostDividedByItsRanks) {
  const TinyRun run;
  const auto threads = [&](const char* ranks_here, const Settings& overrides) {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"})
      setenv(name, ranks_here, 1);
    setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    apply_threads(load_train_config_text(run.yaml(), "tiny.yaml", overrides, 0).config);
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK"})
      unsetenv(name);
    return num_threads();
  };
  const int cores = threads("1", {"run.threads=auto"});
  EXPECT_EQ(threads("2", {"run.threads=auto"}), std::max(1, cores / 2));
  EXPECT_EQ(threads("1000000", {"run.threads=auto"}), 1);
  EXPECT_EQ(threads("2", {"run.threads=3"}), 3);
  set_num_threads(1);
}

/// Rank 1 of two: what rank 0 has to send arrives after a while. Counts how often the wait is polled.
class WaitingRank final : public CheckedCommunicator {
 public:
  WaitingRank() : CheckedCommunicator(1, 2, "world") {}
  void barrier() override {}
  std::shared_ptr<Communicator> split(int, int, const std::string&) override { return nullptr; }

  static constexpr auto kWait = std::chrono::milliseconds(300);
  int64_t polls = 0;

 private:
  class Arrival final : public Work::Impl {
   public:
    explicit Arrival(int64_t& polls) : polls_(polls) {}
    void wait() override {}
    bool test() override {
      polls_++;
      return std::chrono::steady_clock::now() - begin_ > kWait;
    }

   private:
    int64_t& polls_;
    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  };
  Work start(CollectiveCall) override { return Work(std::make_unique<Arrival>(polls)); }
};

TEST(Edges, MP_07_RanksThatWaitForThePreparationSleep) {
  TinyRun run;
  run.train(1, {"run.steps=0"});  // prepares
  const LoadedConfig loaded = load_train_config_text(run.yaml(), "tiny.yaml", {}, 0);
  WaitingRank world;
  EXPECT_NE(open_data(loaded.config, loaded.tree, world).train, nullptr);
  EXPECT_GE(world.polls, 2);
  EXPECT_LE(world.polls, 2 + WaitingRank::kWait / std::chrono::milliseconds(10))
      << "a busy wait takes a core from rank 0";
}

TEST(Edges, LG_05_TheLoggedTimeOfStepsHasNoSavingInIt) {
  constexpr double kDelay = 0.4, kSaves = 4;
  setenv("SHOAL_CHECKPOINT_FAILPOINT", "before-rename:delay:400", 1);
  TinyRun run;
  auto begin = std::chrono::steady_clock::now();
  TinyRun::Hooks hooks;
  hooks.before_run = [&] { begin = std::chrono::steady_clock::now(); };
  run.train(1, {"run.steps=4", "checkpoint.every=1", "eval.at_end=false"}, hooks);
  const double whole = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  unsetenv("SHOAL_CHECKPOINT_FAILPOINT");
  double steps = 0;
  std::ifstream file(run.folder / "tiny/metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    const nlohmann::json row = nlohmann::json::parse(line);
    if (row["kind"] != "step") continue;
    steps += row["step_ms"].get<double>() / 1000;
    EXPECT_NEAR(row["tokens_per_s"].get<double>() * row["step_ms"].get<double>() / 1000, 8 * 16, 1e-6);
  }
  EXPECT_GT(steps, 0);
  // However slow the machine is: the steps and the delays are disjoint parts of the whole.
  EXPECT_LE(steps, whole - kSaves * kDelay);
}

/// Every key with a value that is not the base's, and whether a resumed run may have it.
enum class Resume { may_differ, must_not };
const std::map<std::string, std::pair<std::string, Resume>>& other_values() {
  constexpr auto may = Resume::may_differ, no = Resume::must_not;
  static const std::map<std::string, std::pair<std::string, Resume>> values = {
      {"run.name", {"x", may}},
      {"run.folder", {"/nowhere", may}},
      {"run.steps", {"11", may}},
      {"run.seed", {"7", no}},
      {"run.check_replicas", {"2", may}},
      {"run.log_every", {"3", may}},
      {"run.check_replicas", {"3", may}},
      {"run.profile", {"4", may}},
      {"run.profile_after", {"7", may}},
      {"run.resume", {"required", may}},
      {"run.threads", {"2", may}},
      {"run.device", {"cuda", may}},
      {"run.precision", {"f64", no}},
      {"run.deterministic", {"rank_invariant", no}},
      {"run.allow_config_change", {"true", may}},
      {"model.layers", {"3", no}},
      {"model.vocab_size", {"300", no}},
      {"model.hidden_size", {"32", no}},
      {"model.heads", {"4", no}},
      {"model.kv_heads", {"1", no}},
      {"model.head_size", {"4", no}},
      {"model.bias", {"true", no}},
      {"model.tie_embeddings", {"false", no}},
      {"model.recompute", {"block", may}},
      {"model.moe.num_experts", {"8", no}},
      {"model.moe.top_k", {"1", no}},
      {"model.moe.hidden", {"16", no}},
      {"model.moe.router.score", {"softmax", no}},
      {"model.moe.router.bias_rate", {"0.5", no}},
      {"model.moe.capacity_factor", {"1.5", no}},
      {"model.moe.expert_precision", {"fp8", no}},
      {"data.seq_len", {"8", no}},
      {"data.global_batch", {"4", no}},
      {"data.micro_batch", {"2", may}},
      {"data.prepared", {"/nowhere", may}},
      {"data.split.val_fraction", {"0.2", no}},
      {"data.loader.seed", {"5", no}},
      {"data.loader.mask_documents", {"true", no}},
      {"optim.learning_rate", {"0.5", no}},
      {"optim.clip_norm", {"2", no}},
      {"optim.optimizer.kind", {"sgd", no}},
      {"optim.schedule.warmup_steps", {"3", no}},
      {"parallel.ep", {"2", may}},
      {"parallel.bucket_mb", {"1", may}},
      {"eval.every", {"2", may}},
      {"eval.samples", {"2", may}},
      {"eval.at_end", {"false", may}},
      {"checkpoint.every", {"2", may}},
      {"checkpoint.keep_last", {"2", may}},
      {"checkpoint.at_end", {"false", may}},
  };
  return values;
}

TEST(Edges, RS_09_EveryKeyIsEitherFreeAtResumeOrRefused) {
  TinyRun run;
  const auto yaml_of = [&](const Settings& overrides) {
    return to_yaml(load_train_config_text(run.yaml(), "tiny.yaml", overrides, 0).config);
  };
  const std::string before = yaml_of({});
  for (const auto& [key, other] : other_values()) {
    const auto& [value, resume] = other;
    Settings overrides = {str(key, '=', value)};
    if (key == "run.profile_after") overrides.emplace_back("run.profile=1");  // else it has no meaning
    if (key == "model.moe.expert_precision") overrides.emplace_back("model.moe.hidden=16");  // which it needs
    const ConfigChanges changes = compare_configs(before, yaml_of(overrides));
    const auto& expected = resume == Resume::may_differ ? changes.harmless : changes.meaningful;
    const auto names_it = [&](const std::string& change) {
      return change.starts_with(key + ": ") || change.starts_with(key + ".0: ");  // the first item of a list
    };
    EXPECT_TRUE(std::ranges::any_of(expected, names_it)) << key << " is not listed as it should be";
    EXPECT_TRUE(resume == Resume::must_not || changes.meaningful.empty()) << key;
  }
  // Keys of the sections that the trainer itself reads must all be in the table.
  for (const auto& [key, value] : flat_settings(before)) {
    const bool of_the_trainer = key.starts_with("run.") || key.starts_with("eval.");
    EXPECT_TRUE(!of_the_trainer || other_values().contains(key))
        << key << ": say here whether a resumed run may differ in it";
  }
}

}  // namespace
}  // namespace shoal::testing
