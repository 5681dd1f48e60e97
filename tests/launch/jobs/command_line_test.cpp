// The command line as a user meets it: output, errors and exit codes of the built `shoal`, alone and under
// mpirun.
#include "tests/launch/jobs/shoal_jobs.h"

namespace shoal::testing {
namespace {

const char* const kCommands[] = {"prepare", "train",  "eval",   "generate",
                                 "inspect", "report", "config", "bench"};

/// One trained run for all tests that only read: two ranks, experts split over them.
const ShoalFolder& trained() {
  static const ShoalFolder folder;
  static const Ended ended = folder.shoal(2, {"train", "tiny.yaml", "parallel.ep=2"});
  SHOAL_CHECK(ended.code == 0, "the run that the tests share failed with code ", ended.code, ":\n",
              ended.all());
  return folder;
}

/// Exactly one line says "error:", with all of `parts` in stderr, and the exit code is `code`.
void expect_error(const Ended& ended, int code, const std::vector<std::string>& parts) {
  EXPECT_EQ(ended.code, code) << ended.all();
  EXPECT_EQ(count(ended.err, "error:"), 1) << ended.err;
  EXPECT_EQ(count(ended.out, "error:"), 0) << ended.out;
  for (const std::string& part : parts)
    EXPECT_TRUE(contains(ended.err, part)) << part << "\nin\n" << ended.err;
}

TEST(CommandLine, VersionNamesWhatItWasBuiltWith) {
  const ShoalFolder folder;
  const Ended ended = folder.shoal({"--version"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_EQ(ended.err, "");
  for (const char* part : {"shoal ", "revision ", "compiler ", "mpi ", "hdf5 ", "cuda ", "nccl ", "cpu "})
    EXPECT_TRUE(contains(ended.out, part)) << part << "\n" << ended.out;
}

TEST(CommandLine, EveryCommandExplainsItself) {
  const ShoalFolder folder;
  const Ended all = folder.shoal({"--help"});
  EXPECT_EQ(all.code, 0);
  for (const char* command : kCommands) {
    EXPECT_TRUE(contains(all.out, str("\n  ", command, ' '))) << all.out;
    const Ended ended = folder.shoal({command, "--help"});
    EXPECT_EQ(ended.code, 0) << command;
    EXPECT_EQ(ended.err, "") << command;
    EXPECT_TRUE(contains(ended.out, str("shoal ", command, " [OPTIONS]"))) << ended.out;
  }
}

TEST(CommandLine, WrongUsageIsOneErrorWithASuggestionAndCode2) {
  const ShoalFolder folder;
  expect_error(folder.shoal(std::vector<std::string>{}), 2, {"--help"});
  expect_error(folder.shoal({"trian", "tiny.yaml"}), 2,
               {"unknown command 'trian'", "did you mean 'train'?", "prepare, train, eval"});
  for (const char* command : {"prepare", "train", "eval", "generate", "inspect"})
    expect_error(folder.shoal({command}), 2, {"required", "--help"});
  expect_error(folder.shoal({"config"}), 2, {"--schema"});
  expect_error(folder.shoal({"generate", "runs/tiny", "--temprature", "0.5"}), 2,
               {"unknown argument '--temprature'", "did you mean '--temperature'?"});
  expect_error(folder.shoal({"train", "tiny.yaml", "steps"}), 2,
               {"unknown argument 'steps'", "settings are given as key=value"});
  expect_error(folder.shoal({"generate", "runs/tiny", "--top-p", "1.5"}), 2, {"--top-p", "1.5"});
}

TEST(CommandLine, CF_01_ConfigErrorsNameFileLineColumnAndAreReportedTogether) {
  const ShoalFolder folder;
  std::ofstream(folder.path("bad.yaml")) << "run: {name: bad, steps: many}\n"
                                         << "model:\n"
                                         << "  hiden_size: 16\n"
                                         << "data: {text: [text.txt]}\n"
                                         << "checkpoint: {every: -1}\n";
  for (const char* command : {"config", "train", "prepare"}) {
    expect_error(folder.shoal({command, "bad.yaml"}), 2,
                 {"3 problems", "run.steps (bad.yaml:1:25): expected an integer", "got 'many'",
                  "model.hiden_size (bad.yaml:3:3): unknown key, did you mean 'hidden_size'?",
                  "checkpoint.every (bad.yaml:5:21)"});
  }
  expect_error(folder.shoal({"train", "tiny.yaml", "optim.learning_rat=3"}), 2,
               {"optim.learning_rat (command line)", "did you mean 'learning_rate'?"});
  std::ofstream(folder.path("broken.yaml")) << "run: {name: x\nmodel: [\n";
  const Ended broken = folder.shoal({"train", "broken.yaml"});
  expect_error(broken, 2, {"broken.yaml:"});
  EXPECT_FALSE(contains(broken.err, "data.text")) << broken.err;
  EXPECT_FALSE(std::filesystem::exists(folder.path("runs"))) << "a refused config left something behind";
}

TEST(CommandLine, ARouterThatIsNotCausalSaysSoOnce) {
  const ShoalFolder folder;
  const Ended ended = folder.shoal(
      2, {"train", "tiny.yaml", "run.steps=2", "parallel.ep=2", "model.moe.router=expert_choice"});
  EXPECT_EQ(ended.code, 0) << ended.all();
  EXPECT_EQ(count(ended.err, "warning: router expert_choice is not causal"), 1) << ended.all();
}

TEST(CommandLine, MissingFilesAreNamed) {
  const ShoalFolder folder;
  const Ended missing = folder.shoal({"train", "nowhere.yaml"});
  expect_error(missing, 2, {"nowhere.yaml", "no such file"});
  EXPECT_FALSE(contains(missing.err, "data.text")) << "only one thing is wrong:\n" << missing.err;
  expect_error(folder.shoal({"train", "tiny.yaml", "data.text=[nowhere.txt]"}), 2, {"nowhere.txt"});
  for (const char* command : {"eval", "generate", "inspect", "report"})
    expect_error(folder.shoal({command, "runs/nowhere"}), 2, {"runs/nowhere"});
  for (const char* command : {"eval", "generate"})  // an experiment that has not been trained
    expect_error(folder.shoal({command, "tiny.yaml"}), 2, {});
}

TEST(CommandLine, ConfigPrintsTheOriginOfEveryValue) {
  const ShoalFolder folder;
  const Ended ended = folder.shoal({"config", "tiny.yaml", "run.seed=7", "--optim.clip_norm=2"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  std::map<std::string, std::string> origins;  // line without its comment -> comment
  std::istringstream lines(ended.out);
  for (std::string line; std::getline(lines, line);) {
    const size_t hash = line.find(" # ");
    if (hash == std::string::npos) continue;
    origins[line.substr(0, line.find_last_not_of(' ', hash) + 1)] = line.substr(hash + 3);
  }
  EXPECT_EQ(origins["  steps: 6"], "tiny.yaml:1:26");
  EXPECT_EQ(origins["  seed: 7"], "command line");
  EXPECT_EQ(origins["  clip_norm: 2"], "command line");
  EXPECT_EQ(origins["  every: 3"].substr(0, 10), "tiny.yaml:");
  EXPECT_EQ(origins["    bias_rate: 0.01"], "");
  EXPECT_EQ(origins["  device: cpu"], "default");
  // What it prints is a config with the same meaning.
  std::ofstream(folder.path("printed.yaml")) << ended.out;
  const Ended again = folder.shoal({"config", "printed.yaml"});
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_TRUE(contains(again.out, "  seed: 7 ")) << again.out;
}

TEST(CommandLine, ConfigChecksTheLayoutForAWorld) {
  const ShoalFolder folder;
  EXPECT_EQ(folder.shoal({"config", "tiny.yaml", "--world", "4"}).code, 0);
  expect_error(folder.shoal({"config", "tiny.yaml", "parallel.ep=3", "--world", "4"}), 2,
               {"config parallel.ep", "must divide the world size (4)"});
}

TEST(CommandLine, SchemaIsJsonAndKnowsEverySection) {
  const ShoalFolder folder;
  const Ended ended = folder.shoal({"config", "--schema"});
  EXPECT_EQ(ended.code, 0);
  const nlohmann::json schema = nlohmann::json::parse(ended.out);
  EXPECT_EQ(schema["type"], "object");
  for (const char* section : {"run", "model", "data", "optim", "parallel", "eval", "checkpoint"})
    EXPECT_TRUE(schema["properties"].contains(section)) << section;
}

TEST(CommandLine, ExplainDocumentsOneKey) {
  const ShoalFolder folder;
  const Ended ended = folder.shoal({"config", "--explain", "model.moe.top_k"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_TRUE(contains(ended.out, "model.moe.top_k: integer")) << ended.out;
  expect_error(folder.shoal({"config", "--explain", "model.moe.topk"}), 2, {"did you mean 'top_k'?"});
}

TEST(CommandLine, ExplainTellsTheDefaultApartFromTheValueOfTheFile) {
  const ShoalFolder folder;
  const Ended ended = folder.shoal({"config", "tiny.yaml", "run.seed=77", "--explain", "run.seed"});
  EXPECT_EQ(ended.code, 0) << ended.all();
  EXPECT_TRUE(contains(ended.out, "run.seed: integer, default 1\n")) << ended.out;
  EXPECT_TRUE(contains(ended.out, "in tiny.yaml:\n  run.seed: 77\n")) << ended.out;
}

TEST(CommandLine, TrainingAloneLeavesARunAndASecondCallHasNothingToDo) {
  const ShoalFolder folder;
  const Ended first = folder.shoal({"train", "tiny.yaml"});
  EXPECT_EQ(first.code, 0) << first.all();
  EXPECT_EQ(first.err, "");
  for (const char* part : {"parameters", "6 steps", "validation at step 6", "checkpoint of step 6 saved"})
    EXPECT_TRUE(contains(first.out, part)) << part << "\n" << first.out;
  EXPECT_EQ(folder.rows().size(), 7U);  // 6 steps and the evaluation
  EXPECT_TRUE(std::filesystem::exists(folder.path("runs/tiny/config.yaml")));
  const auto before = folder.checkpoint_bytes(6);
  const Ended second = folder.shoal({"train", "tiny.yaml"});
  EXPECT_EQ(second.code, 0) << second.all();
  EXPECT_TRUE(contains(second.out, "nothing to do")) << second.out;
  EXPECT_TRUE(contains(second.out, "already prepared")) << second.out;
  EXPECT_EQ(before, folder.checkpoint_bytes(6));
  EXPECT_EQ(folder.rows().size(), 7U);
  // And more steps go on from there.
  const Ended more = folder.shoal(2, {"train", "tiny.yaml", "run.steps=8", "run.allow_config_change=true"});
  EXPECT_EQ(more.code, 0) << more.all();
  EXPECT_TRUE(contains(more.out, "(step 6)")) << more.out;
  EXPECT_TRUE(std::filesystem::exists(folder.checkpoint(8)));
}

TEST(CommandLine, TrainingUnderMpirunPrintsOnceAndEndsCleanly) {
  const ShoalFolder folder;
  Job job(ShoalFolder::command(2, {"train", "tiny.yaml", "parallel.ep=2"}), folder.path(""));
  const Ended ended = job.wait();
  EXPECT_EQ(ended.code, 0) << ended.all();
  EXPECT_EQ(ended.err, "");
  EXPECT_EQ(count(ended.out, "layout     dp 2, ep 2"), 1) << ended.out;
  EXPECT_EQ(count(ended.out, "validation at step 6"), 1) << ended.out;
  EXPECT_TRUE(job.leaves_nothing_alive());
  EXPECT_TRUE(folder.shared_memory().empty()) << folder.shared_memory().front();
  const Ended again = folder.shoal(2, {"train", "tiny.yaml", "parallel.ep=2"});
  EXPECT_EQ(again.code, 0);
  EXPECT_EQ(count(again.out, "nothing to do"), 1) << again.out;
}

TEST(CommandLine, ErrorsUnderMpirunArePrintedOnce) {
  const ShoalFolder folder;
  expect_error(folder.shoal(2, {"train", "tiny.yaml", "model.moe.top_k=9"}), 2, {"model.moe.top_k"});
  expect_error(folder.shoal(2, {"train", "tiny.yaml", "parallel.ep=3"}), 2, {"config parallel.ep"});
  expect_error(folder.shoal(2, {"train", "tiny.yaml", "data.text=[nowhere.txt]"}), 2, {"nowhere.txt"});
  expect_error(folder.shoal(2, {"eval", "runs/nowhere"}), 2, {"runs/nowhere"});
}

TEST(CommandLine, AChangedExperimentIsRefusedOnceUnderMpirun) {
  expect_error(trained().shoal(2, {"train", "tiny.yaml", "parallel.ep=2", "optim.learning_rate=0.5"}), 2,
               {"optim.learning_rate", "run.allow_config_change"});
}

TEST(CommandLine, EvaluationGivesTheSameLossUnderAnyNumberOfRanks) {
  std::vector<std::string> outputs;
  for (const int ranks : {1, 2, 3}) {
    const Ended ended = trained().shoal(ranks, {"eval", "runs/tiny"});
    EXPECT_EQ(ended.code, 0) << ended.all();
    EXPECT_EQ(count(ended.out, "validation at step 6: loss "), 1) << ended.out;
    outputs.push_back(ended.out);
  }
  EXPECT_EQ(outputs[0], outputs[1]);
  EXPECT_EQ(outputs[0], outputs[2]);
  const double stored = trained().rows().back()["loss"];  // of the evaluation while training
  double printed = 0;
  const size_t at = outputs[0].find("loss ");
  ASSERT_NE(at, std::string::npos);
  printed = std::stod(outputs[0].substr(at + 5));
  EXPECT_NEAR(printed, stored, 6e-5);
  const Ended older = trained().shoal({"eval", "runs/tiny", "--step", "3"});
  EXPECT_EQ(older.code, 0) << older.all();
  EXPECT_TRUE(contains(older.out, "validation at step 3")) << older.out;
  expect_error(trained().shoal({"eval", "runs/tiny", "--step", "4"}), 2, {"step 4"});
}

TEST(CommandLine, GenerationIsDeterministicAndDependsOnTheSeed) {
  auto generated = [](int ranks, std::vector<std::string> options) {
    options.insert(options.begin(), {"generate", "runs/tiny", "--prompt", "the ", "--tokens", "24"});
    const Ended ended = trained().shoal(ranks, options);
    EXPECT_EQ(ended.code, 0) << ended.all();
    EXPECT_EQ(ended.err, "");
    EXPECT_EQ(ended.out.substr(0, 4), "the ");
    return ended.out;
  };
  const std::string drawn = generated(1, {"--seed", "3"});
  EXPECT_EQ(drawn, generated(1, {"--seed", "3"}));
  EXPECT_NE(drawn, generated(1, {"--seed", "4"}));
  const std::string greedy = generated(1, {"--temperature", "0"});
  EXPECT_EQ(greedy, generated(1, {"--temperature", "0", "--seed", "9"}));
  EXPECT_EQ(greedy, generated(1, {"--top-k", "1", "--seed", "5"}));
  EXPECT_EQ(greedy, generated(2, {"--temperature", "0"}));
  EXPECT_EQ(drawn, generated(2, {"--seed", "3"}));
}

TEST(CommandLine, GenerationTakesOddRequestsOrRefusesThem) {
  struct Request {
    std::vector<std::string> options;
    int code;
    std::string out, err;  // out: the whole of it
  };
  const std::string beyond(100, 'a');  // more than the 16 positions it was trained on; rope has no limit
  const std::vector<Request> requests = {
      {{"--prompt", "the", "--tokens", "0"}, 0, "the\n", ""},
      {{"--prompt", ""}, 2, "", "expected a prompt of at least one token"},
      {{"--prompt", beyond, "--tokens", "0"}, 0, beyond + "\n", ""},
      {{"--prompt", "the", "--tokens", "-1"}, 2, "", "--tokens"},
      {{"--prompt", "the", "--temperature", "-1"}, 2, "", "--temperature"},
      {{"--prompt", "the", "--top-k", "-1"}, 2, "", "--top-k"},
      {{"--prompt", "the", "--stop", "the"}, 2, "", "--stop: 'the' is not one token"},
      {{"--step", "-1"}, 2, "", "--step"},
  };
  for (const Request& request : requests) {
    std::vector<std::string> arguments = {"generate", "runs/tiny"};
    arguments.insert(arguments.end(), request.options.begin(), request.options.end());
    const Ended ended = trained().shoal(arguments);
    EXPECT_EQ(ended.code, request.code) << ended.all();
    EXPECT_EQ(ended.out, request.out);
    EXPECT_TRUE(request.err.empty() ? ended.err.empty() : contains(ended.err, request.err)) << ended.err;
  }
  auto text = [](const std::vector<std::string>& options) {
    std::vector<std::string> arguments = {"generate", "runs/tiny", "--prompt", "the ", "--tokens", "8"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    return trained().shoal(arguments).out;
  };
  EXPECT_EQ(text({"--top-p", "0"}), text({"--temperature", "0"}));
  EXPECT_EQ(text({"--top-k", "1000000"}), text({"--top-k", "0"}));
}

TEST(CommandLine, EvaluationWithoutHeldOutDataIsRefused) {
  expect_error(trained().shoal({"eval", "runs/tiny", "data.split.val_fraction=0"}), 2,
               {"there is no held-out data", "data.split.val_fraction"});
  expect_error(trained().shoal({"eval", "runs/tiny", "data.seq_len=100000"}), 2, {"one sample needs 100001"});
  const Ended longer = trained().shoal({"eval", "runs/tiny", "data.seq_len=40", "eval.samples=2"});
  EXPECT_EQ(longer.code, 0) << "rope knows no longest sequence: " << longer.all();
}

TEST(CommandLine, LearnedPositionsRefuseLongerSequencesThanTheyWereTrainedOn) {
  const ShoalFolder folder;
  ASSERT_EQ(folder.shoal({"train", "tiny.yaml", "model.position=learned", "run.steps=1"}).code, 0);
  expect_error(folder.shoal({"eval", "runs/tiny", "data.seq_len=40"}), 2, {"position", "16", "40"});
  expect_error(folder.shoal({"generate", "runs/tiny", "--prompt", std::string(17, 'a')}), 2,
               {"at most 16 tokens", "got 17"});
}

TEST(CommandLine, OddNumbersOfRanksTrainToTheSameLossUnderMpirun) {
  const auto loss_of = [](int ranks, const char* ep) {
    const ShoalFolder folder;
    const Ended ended =
        folder.shoal(ranks, {"train", "tiny.yaml", "run.steps=2", "run.precision=f64",
                             "data.global_batch=105", "data.seq_len=2", "model.moe.num_experts=105",
                             "model.moe.hidden=2", str("parallel.ep=", ep)});
    EXPECT_EQ(ended.code, 0) << ended.all();
    const auto rows = folder.rows();
    return rows.empty() ? 0.0 : rows.back()["loss"].get<double>();
  };
  const double one = loss_of(1, "1");
  EXPECT_GT(one, 1);
  EXPECT_NEAR(loss_of(3, "1"), one, 1e-9);
  EXPECT_NEAR(loss_of(5, "5"), one, 1e-9);
  EXPECT_NEAR(loss_of(7, "auto"), one, 1e-9);
}

TEST(CommandLine, TrainingThatDivergesEndsWithCode1AndSaysWhere) {
  const ShoalFolder folder;
  const Ended ended =
      folder.shoal(2, {"train", "tiny.yaml", "optim={learning_rate: 1e30, optimizer: sgd, clip_norm: 0}"});
  EXPECT_EQ(ended.code, 1) << ended.all();
  for (const char* part : {"step 3: no update, not finite: ", "(first in backward)", "training diverged: "})
    EXPECT_TRUE(contains(ended.all(), part)) << part << "\n" << ended.all();
  EXPECT_FALSE(std::filesystem::exists(folder.checkpoint(6)));
}

TEST(CommandLine, ManyMoreThreadsThanCoresTrain) {
  const ShoalFolder folder;
  const Ended ended = folder.shoal({"train", "tiny.yaml", "run.steps=1", "run.threads=100"});
  EXPECT_EQ(ended.code, 0) << ended.all();
}

TEST(CommandLine, InspectFindsAFlippedByteAndNamesTheFile) {
  const ShoalFolder folder;
  ASSERT_EQ(folder.shoal({"train", "tiny.yaml"}).code, 0);
  const Ended good = folder.shoal({"inspect", "runs/tiny", "--tensors"});
  EXPECT_EQ(good.code, 0) << good.all();
  EXPECT_EQ(count(good.out, "ok\n"), 2) << good.out;  // steps 3 and 6
  EXPECT_TRUE(contains(good.out, "model/layers.1.moe.experts.w1")) << good.out;
  const std::filesystem::path shard = folder.checkpoint(6) / "w0000.h5";
  std::string bytes = file_bytes(shard);
  bytes[bytes.size() / 2] ^= 0x10;
  std::ofstream(shard, std::ios::binary) << bytes;
  const Ended bad = folder.shoal({"inspect", "runs/tiny"});
  EXPECT_EQ(bad.code, 1) << bad.all();
  EXPECT_EQ(count(bad.out, "BAD"), 1) << bad.out;
  EXPECT_TRUE(contains(bad.out, "w0000.h5")) << bad.out;
  EXPECT_EQ(folder.shoal({"inspect", folder.checkpoint(3).string()}).code, 0);
  EXPECT_EQ(folder.shoal({"inspect", folder.checkpoint(6).string()}).code, 1);
  // Training does not take it, but the one before.
  const Ended again = folder.shoal({"train", "tiny.yaml"});
  EXPECT_EQ(again.code, 0) << again.all();
  EXPECT_TRUE(contains(again.all(), "checkpoint rejected")) << again.all();
  EXPECT_TRUE(contains(again.out, "(step 3)")) << again.out;
  EXPECT_EQ(folder.shoal({"inspect", folder.checkpoint(6).string()}).code, 0);
}

TEST(CommandLine, ReportIsOneHtmlPage) {
  const Ended ended = trained().shoal({"report", "runs/tiny", "-o", "page.html"});
  EXPECT_EQ(ended.code, 0) << ended.all();
  EXPECT_TRUE(contains(ended.out, "page.html")) << ended.out;
  const std::string page = file_bytes(trained().path("page.html"));
  EXPECT_EQ(page.substr(0, 15), "<!DOCTYPE html>");
  EXPECT_TRUE(contains(page, "<svg"));
  EXPECT_TRUE(contains(page, "</html>"));
}

TEST(CommandLine, TrainingUsesWhatPrepareHasMade) {
  const ShoalFolder folder;
  const Ended prepared = folder.shoal({"prepare", "tiny.yaml"});
  EXPECT_EQ(prepared.code, 0) << prepared.all();
  EXPECT_FALSE(std::filesystem::exists(folder.path("runs/tiny")));
  const Ended ended = folder.shoal({"train", "tiny.yaml", "run.steps=1"});
  EXPECT_EQ(ended.code, 0) << ended.all();
  EXPECT_TRUE(contains(ended.out, "already prepared")) << ended.out;
}

}  // namespace
}  // namespace shoal::testing
