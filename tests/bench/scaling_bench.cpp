// Weak scaling: steps of one rank alone, and of all ranks under each way of using them, with as many tokens
// for each rank; one thread per rank, random tokens.
//   mpirun -n 2 --bind-to core build/tests/bench/scaling_bench [--precision bf16] [--rounds 9]
// Prints the median time of a step, and the median over rounds of one rank's time divided by it (1: perfect;
// the other ranks sleep while one works alone). Rounds take turns, so that a neighbour on the machine
// disturbs all.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/base/threads.h"
#include "launch/bench.h"
#include "launch/engine_options.h"
#include "parallel/bootstrap.h"

namespace {

using namespace shoal;

constexpr int64_t kVocab = 4096, kSequences = 4;  // sequences of each rank
constexpr const char* kConfig = R"(
run: {name: bench, threads: 1}
model:
  {layers: 4, hidden_size: 256, heads: 8, kv_heads: 4,
   moe: {num_experts: 16, top_k: 4, hidden: 256, shared_experts: 1}}
data: {text: [unused], seq_len: 256}
)";

struct Case {
  std::string name;
  std::vector<std::string> settings;
};

std::vector<Case> cases_for(int ranks) {
  const auto all = [&](const char* axis) { return str("parallel.", axis, '=', ranks); };
  const std::string alone = "parallel.ep=1";
  return {{"dp", {alone}},
          {"dp, zero 1", {alone, "parallel.zero=1"}},
          {"dp, zero 2", {alone, "parallel.zero=2"}},
          {"dp, zero 3", {alone, "parallel.zero=3"}},
          {"dp, rank_invariant", {alone, "run.deterministic=rank_invariant"}},
          {"dp, ep", {all("ep")}},
          {"ep, rank_invariant", {all("ep"), "run.deterministic=rank_invariant"}},
          {"tp", {alone, all("tp")}},
          {"tp, ep", {all("tp"), all("ep")}},
          {"cp", {alone, all("cp")}},
          {"cp, ring", {alone, all("cp"), "parallel.context=ring"}},
          {"etp", {alone, all("etp")}},
          {"pp, 1f1b", {alone, all("pp"), str("data.micro_batch=", 2)}},
          {"pp, zero_bubble",
           {alone, all("pp"), "data.micro_batch=2", "parallel.pipeline.schedule=zero_bubble"}}};
}

/// A training of random tokens.
class Training {
 public:
  Training(std::vector<std::string> settings, const std::string& precision,
           const std::shared_ptr<Communicator>& world)
      : world_(world) {
    const int ranks = world->size();
    settings.push_back("run.precision=" + precision);
    settings.push_back(str("data.global_batch=", kSequences * ranks));
    const TrainConfig config = load_train_config_text(kConfig, "scaling_bench", settings, ranks).config;
    const ParallelLayout layout = layout_of(config, ranks);
    mesh_ = std::make_unique<Mesh>(world, layout);
    engine_ = std::make_unique<TrainEngine>(engine_options(config, kVocab), *mesh_);
    const int64_t micro = micro_batch_of(config, layout),
                  count = config.data.global_batch / (micro * layout.dp);
    for (int64_t i = 0; i < count; i++) {
      const auto stream = static_cast<uint64_t>(mesh_->coords()[Axis::dp].index * count + i);
      batches_.push_back(
          cut_sequences(random_batch(micro, config.data.seq_len, kVocab, stream), mesh_->coords()[Axis::cp]));
    }
    for (int i = 0; i < 2; i++) step_ms();
  }
  double step_ms() {
    constexpr double kLearningRate = 1e-6;  // so that the routers stay as balanced as they begin
    world_->barrier();
    const auto begin = std::chrono::steady_clock::now();
    engine_->step(batches_, kLearningRate);
    world_->barrier();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  std::shared_ptr<Communicator> world_;
  std::unique_ptr<Mesh> mesh_;
  std::unique_ptr<TrainEngine> engine_;
  std::vector<ModelBatch> batches_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// One rank's step while the others sleep. Collective.
double alone_ms(Training* alone, Communicator& world) {
  world.barrier();
  const double ms = alone != nullptr ? alone->step_ms() : 0;
  Tensor done = Tensor::from(std::vector<double>{ms}, {1});
  Work arrives = world.broadcast(done, 0);
  while (alone == nullptr && !arrives.test()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  arrives.wait();
  return done.item();
}

int run(const std::shared_ptr<Communicator>& world, const std::string& precision, int rounds) {
  if (world->size() == 1) throw UsageError("scaling_bench: needs ranks; start it with mpirun -n 2");
  set_num_threads(1);
  const bool first = world->rank() == 0;
  std::unique_ptr<Training> alone;
  if (first)
    alone = std::make_unique<Training>(std::vector<std::string>{}, precision, make_single_communicator());
  if (first)
    fmt::print("{} ranks, {}{:>21}{:>12}{:>14}\n", world->size(), precision, "ms per step", "one rank",
               "efficiency");
  for (const Case& c : cases_for(world->size())) {
    std::unique_ptr<Training> together;
    try {
      together = std::make_unique<Training>(c.settings, precision, world);
    } catch (const UsageError& e) {  // on every rank
      if (first) fmt::print("{:<21}not legal: {}\n", c.name, e.what());
      continue;
    }
    std::vector<double> ms, one, ratios;
    for (int round = 0; round < rounds; round++) {
      one.push_back(alone_ms(alone.get(), *world));
      ms.push_back(together->step_ms());
      ratios.push_back(one.back() / ms.back());
    }
    if (!first) continue;
    fmt::print("{:<21}{:>14.1f}{:>12.1f}{:>14.2f}\n", c.name, median(ms), median(one), median(ratios));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Weak scaling of the layouts of some ranks");
  std::string precision = "f32";
  int rounds = 9;
  app.add_option("--precision", precision, "f32 or bf16");
  app.add_option("--rounds", rounds, "rounds for each layout")->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  return shoal::run_world(
      [&](const std::shared_ptr<shoal::Communicator>& world) { return run(world, precision, rounds); });
}
