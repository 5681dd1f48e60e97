// Wrong use of the built `shoal`: mistyped commands, overrides that a command cannot honour, wrong variables
// of the environment, trainings that do not fit the machine.
#include "tests/launch/jobs/shoal_jobs.h"

namespace shoal::testing {
namespace {

/// Exactly one line says "error:", with all of `parts` in stderr, and the exit code is 2.
void expect_refused(const Ended& ended, const std::vector<std::string>& parts) {
  EXPECT_EQ(ended.code, 2) << ended.all();
  EXPECT_EQ(count(ended.err, "error:"), 1) << ended.err;
  for (const std::string& part : parts)
    EXPECT_TRUE(contains(ended.err, part)) << part << "\nin\n" << ended.err;
}

/// One trained run for all tests that only read.
const ShoalFolder& trained() {
  static const ShoalFolder folder;
  static const Ended ended = folder.shoal({"train", "tiny.yaml"});
  SHOAL_CHECK(ended.code == 0, "the run that the tests share failed with code ", ended.code, ":\n",
              ended.all());
  return folder;
}

std::map<std::string, std::string> all_bytes(const std::filesystem::path& folder) {
  std::map<std::string, std::string> bytes;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) bytes[entry.path().string()] = file_bytes(entry.path());
  }
  return bytes;
}

TEST(Usage, AMistypedCommandGetsTheNearestOne) {
  const ShoalFolder folder;
  for (const std::string command :
       {"prepare", "train", "eval", "generate", "inspect", "report", "config", "bench"}) {
    std::string typo = command;
    std::swap(typo[1], typo[2]);
    expect_refused(folder.shoal({typo, "tiny.yaml"}),
                   {str("unknown command '", typo, "', did you mean '", command, "'?")});
  }
  expect_refused(folder.shoal({"--vresion"}), {"unknown option '--vresion', did you mean '--version'?"});
}

TEST(Usage, BenchRefusesWhatItCannotMeasureBeforeItMeasures) {
  const ShoalFolder folder;
  expect_refused(folder.shoal({"bench", "none.yaml"}), {"none.yaml"});
  expect_refused(folder.shoal({"bench", "tiny.yaml", "run.profile_after=7"}),
                 {"config run.profile_after (command line)", "has no meaning with run.profile: 0"});
  expect_refused(folder.shoal({"bench", "--run.steps=3"}), {"run.steps=3", "name the config first"});
  expect_refused(folder.shoal({"bench", "run.steps=3"}), {"run.steps=3", "name the config first"});
  expect_refused(folder.shoal({"bench", "--seconds", "-1"}), {"--seconds"});
}

TEST(Usage, ALayoutThatNoNumberOfRanksCanHaveIsRefusedWithoutOne) {
  const ShoalFolder folder;
  expect_refused(folder.shoal({"config", "tiny.yaml", "parallel.ep=5"}), {"parallel.ep"});
  EXPECT_EQ(folder.shoal({"config", "tiny.yaml"}).code, 0);
}

TEST(Usage, ARunThatSavesNothingPromisesNoCheckpoint) {
  const ShoalFolder folder;
  const Ended run =
      folder.shoal({"train", "tiny.yaml", "run.steps=1", "checkpoint.every=0", "checkpoint.at_end=false"});
  EXPECT_EQ(run.code, 0) << run.all();
  EXPECT_TRUE(contains(run.out, "no checkpoint")) << run.out;
  EXPECT_FALSE(contains(run.out, " generate ")) << run.out;
}

TEST(Usage, WrongKernelVariablesAreRefusedByWhateverUsesKernels) {
  for (const std::string variable : {"SHOAL_CPU_ISA=avx1024", "SHOAL_GEMM=packd"}) {
    const std::string name = variable.substr(0, variable.find('='));
    for (const std::vector<std::string>& arguments : {std::vector<std::string>{"--version"},
                                                      {"eval", "runs/tiny"},
                                                      {"generate", "runs/tiny"},
                                                      {"prepare", "tiny.yaml"}}) {
      std::vector<std::string> argv = {"env", variable};
      for (const std::string& part : ShoalFolder::command(1, arguments)) argv.push_back(part);
      expect_refused(Job(argv, trained().path("")).wait(), {name});
    }
  }
}

TEST(Usage, OverridesThatChangeNothingAreRefused) {
  for (const char* setting : {"data.tokenizer=char", "data.text=[other.txt]", "optim.learning_rate=1",
                              "run.steps=3", "run={threads: 1, name: other}", "eval.samples=3"})
    expect_refused(trained().shoal({"generate", "runs/tiny", setting}),
                   {"shoal generate: ", "no effect", "parallel.ep"});
  for (const char* setting :
       {"optim.learning_rate=1", "eval.every=3", "checkpoint.every=1", "run.name=other"})
    expect_refused(trained().shoal({"eval", "runs/tiny", setting}),
                   {"shoal eval: ", "no effect", "eval.samples"});
  // Unknown keys are named as such.
  expect_refused(trained().shoal({"eval", "runs/tiny", "eval.sample=3"}), {"did you mean 'samples'?"});
  EXPECT_EQ(trained().shoal({"generate", "runs/tiny", "run.threads=1", "--tokens", "2"}).code, 0);
  EXPECT_EQ(trained().shoal({"generate", "tiny.yaml", "run.name=tiny", "--tokens", "2"}).code, 0);
}

TEST(Usage, EvaluationKeepsTheTokenizerAndTheDataOfTheRun) {
  const ShoalFolder& folder = trained();
  const auto before = all_bytes(folder.path("runs"));
  for (const std::vector<std::string>& settings :
       {std::vector<std::string>{"data.tokenizer=char"},
        {"data.tokenizer={kind: bpe, vocab_size: 300}", "data.text=other.txt"}}) {
    std::vector<std::string> arguments = {"eval", "runs/tiny"};
    arguments.insert(arguments.end(), settings.begin(), settings.end());
    expect_refused(folder.shoal(arguments),
                   {"config data.tokenizer (command line): expected the run's own tokenizer"});
  }
  EXPECT_EQ(all_bytes(folder.path("runs")), before) << "a refused evaluation changed something";
  std::filesystem::copy(folder.path("text.txt"), folder.path("other.txt"),
                        std::filesystem::copy_options::overwrite_existing);
  std::ofstream(folder.path("other.txt"), std::ios::app) << "and one more line\n";
  const Ended other = folder.shoal({"eval", "runs/tiny", "data.text=other.txt"});
  EXPECT_EQ(other.code, 0) << other.all();
  EXPECT_TRUE(contains(other.out, "validation at step 6: loss ")) << other.out;
  const auto after = all_bytes(folder.path("runs"));
  for (const auto& [path, bytes] : before) EXPECT_EQ(after.at(path), bytes) << path;
}

TEST(Usage, ATrainingThatDoesNotFitTheMachineIsRefusedAndItsConfigSaysHowLargeItIs) {
  const ShoalFolder folder;
  const std::vector<std::string> huge = {"model.hidden_size=65536", "model.layers=300"};
  expect_refused(
      folder.shoal({"train", "tiny.yaml", huge[0], huge[1]}),
      {"config model (tiny.yaml:", "a rank needs about", "TiB", "optimizer state", "lower model.layers"});
  EXPECT_FALSE(std::filesystem::exists(folder.path("runs")));
  const Ended config = folder.shoal({"config", "tiny.yaml", huge[0], huge[1]});
  EXPECT_EQ(config.code, 0) << config.all();
  EXPECT_TRUE(contains(config.out, "# memory per rank, with 1 rank: ")) << config.out;
  EXPECT_TRUE(contains(config.out, "# more than the ")) << config.out;
  const Ended tiny = folder.shoal({"config", "tiny.yaml", "--world", "2"});
  EXPECT_TRUE(contains(tiny.out, "# memory per rank, with 2 ranks: ")) << tiny.out;
  EXPECT_FALSE(contains(tiny.out, "# more than the ")) << tiny.out;
}

}  // namespace
}  // namespace shoal::testing
