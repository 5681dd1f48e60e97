// What the schema accepts can be trained with: every kind, every word, every switch and both edges of every
// range take two steps and leave finite weights.
#include <gtest/gtest.h>

#include <cmath>

#include "core/base/config_scalar.h"
#include "launch/engine.h"
#include "launch/memory.h"
#include "optim/schedule.h"
#include "tests/launch/every_key.h"
#include "tests/support/expect_close.h"
#include "tests/support/tiny_model.h"

namespace shoal::testing {
namespace {

constexpr int64_t kVocab = 40;

/// Values that the key takes, at the limits of what it takes.
std::vector<std::string> edges_of(const FieldInfo& info) {
  std::vector<std::string> values;
  if (info.type == FieldType::boolean) return {"true", "false"};
  for (const std::string& choice : info.constraint.choices) values.push_back(choice);
  for (const auto& kind : info.kinds) values.push_back(kind.name);
  const Constraint& c = info.constraint;
  if (c.min) values.push_back(format_number(c.exclusive_min ? *c.min * (1 + 1e-9) : *c.min));
  if (c.max) values.push_back(format_number(*c.max));
  if (c.min && c.max && info.type != FieldType::number) values.push_back(format_number(*c.min + 2));
  return values;
}

ModelBatch some_batch(const TrainConfig& config) {
  std::vector<std::vector<int32_t>> rows(static_cast<size_t>(config.data.global_batch));
  for (size_t r = 0; r < rows.size(); r++) {
    for (int64_t s = 0; s < config.data.seq_len; s++)
      rows[r].push_back(static_cast<int32_t>((r * 13 + static_cast<size_t>(s) * 7) % kVocab));
  }
  return batch_of(rows);
}

/// Two steps at the rates of the schedule; whether all weights are finite after them.
bool trains(const TrainConfig& config) {
  const Mesh mesh(make_single_communicator(), ParallelLayout{});
  EngineOptions options;
  options.model = config.model;
  options.optimizer = config.optim.optimizer;
  options.dispatcher = config.parallel.dispatcher;
  options.vocab_size = kVocab;
  options.seq_len = config.data.seq_len;
  options.seed = static_cast<uint64_t>(config.run.seed);
  options.clip_norm = config.optim.clip_norm;
  options.bucket_mb = config.parallel.bucket_mb;
  options.dtype = config.run.precision == "f64" ? DType::f64 : DType::f32;
  TrainEngine engine(options, mesh);
  const auto schedule = ScheduleRegistry::make(config.optim.schedule,
                                               ScheduleContext{config.optim.learning_rate, config.run.steps});
  const ModelBatch batch = some_batch(config);
  for (int64_t step = 1; step <= 2; step++) {
    const double rate = schedule->at(step);
    EXPECT_TRUE(std::isfinite(rate) && rate >= 0 && rate <= config.optim.learning_rate) << rate;
    engine.step(std::span(&batch, 1), rate);
  }
  for (const StateTensor& t : engine.state()) {
    for (const double value : to_doubles(t.value)) {
      if (!std::isfinite(value)) return false;
    }
  }
  return true;
}

TEST(ConfigEdges, EveryKindWordSwitchAndLimitOfTheModelAndTheOptimizerCanBeTrainedWith) {
  int trained = 0, refused = 0, large = 0;
  for (const SchemaKey& key : every_key()) {
    const bool used = key.path.starts_with("model.") || key.path.starts_with("optim.") ||
                      key.path == "parallel.bucket_mb" || key.path == "parallel.dispatcher" ||
                      key.path == "run.precision" || key.path == "run.seed";
    if (!used || key.info.type == FieldType::section) continue;
    for (const std::string& edge : edges_of(key.info)) {
      YamlTree tree = key.tree();
      for (const auto& [path, value] :
           std::vector<std::pair<const char*, const char*>>{{"model.layers", "2"},
                                                            {"model.hidden_size", "16"},
                                                            {"model.heads", "2"},
                                                            {"model.ffn.hidden", "8"},
                                                            {"model.moe.num_experts", "4"},
                                                            {"model.moe.hidden", "16"},
                                                            {"model.moe.shared_experts", "1"},
                                                            {"model.moe.first_dense", "1"},
                                                            {"data.seq_len", "8"},
                                                            {"data.global_batch", "2"},
                                                            {"model.vocab_size", "40"},
                                                            {"model.tie_embeddings", "false"}})
        tree.set(path, value);
      tree.set(key.path, key.info.type == FieldType::choice ? "{kind: " + edge + "}" : edge);
      const std::string text = tree.text();
      LoadedConfig loaded;
      try {
        loaded = load_train_config_text(text, "exp.yaml", {}, 1);
      } catch (const UsageError&) {
        refused++;  // by a rule between keys; that these name their place is tested elsewhere
        continue;
      }
      const ParallelLayout layout = layout_of(loaded.config, 1);
      if (estimate_memory(loaded.config, layout, kVocab).total() > (24 << 20)) {
        large++;
        continue;
      }
      trained++;
      EXPECT_TRUE(trains(loaded.config)) << key.path << ": " << edge << "\n" << text;
    }
  }
  EXPECT_GT(trained, 120);
  EXPECT_LT(refused, 40);
  EXPECT_LT(large, 20);
}

}  // namespace
}  // namespace shoal::testing
