// Training steps of a tiny MoE model on one thread, for counting instructions: `tiny_step f32|bf16`.
// Everything of the program but TrainEngine::step is start-up; the first step packs and allocates, the second
// is a steady one.
#include <cstdio>
#include <cstring>

#include "launch/engine.h"
#include "tests/support/parity.h"

int main(int argc, char** argv) {
  using namespace shoal;
  if (argc != 2 || (std::strcmp(argv[1], "f32") != 0 && std::strcmp(argv[1], "bf16") != 0)) {
    std::fprintf(stderr, "usage: tiny_step f32|bf16\n");
    return 2;
  }
  EngineOptions options;
  options.model = shoal::testing::parity_model(
      {.balance = "bias",
       .model = "hidden_size: 64, moe: {num_experts: 8, top_k: 2, hidden: 48, shared_experts: 1, router: "
                "{kind: top_k, score: sigmoid, bias_rate: 0.01}}"});
  options.optimizer = Choice{"adamw", nullptr};
  options.dispatcher = Choice{"local", nullptr};
  options.vocab_size = shoal::testing::kParityVocab;
  options.seq_len = shoal::testing::kParitySeq;
  options.bf16 = std::strcmp(argv[1], "bf16") == 0;
  const Mesh mesh(make_single_communicator(), ParallelLayout{});
  TrainEngine engine(options, mesh);
  const std::vector<ModelBatch> batches = {shoal::testing::parity_batch(0, 0, shoal::testing::kParityBatch)};
  double loss = 0;
  for (int i = 0; i < 2; i++) loss = engine.step(batches, 1e-3).loss;
  std::printf("%.6f\n", loss);
  return 0;
}
