#include "tests/launch/report_example.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.h"
#include "core/base/random.h"
#include "launch/metrics.h"

namespace shoal::testing {

namespace {

LayerMetrics example_layer(const ExampleRun& run, int64_t layer, int64_t step) {
  const RandomStream random(run.seed, str("layer ", layer));
  const auto experts = static_cast<uint64_t>(run.num_experts);
  const double progress = static_cast<double>(step) / static_cast<double>(run.num_steps);
  std::vector<double> share(experts);
  for (uint64_t e = 0; e < experts; e++) {
    // Each expert has a taste of its own; balancing pulls all towards 0, without it the taste grows.
    const double taste =
        random.normal(e) * (run.balanced ? 1.2 * std::exp(-6 * progress) : 0.4 + 2.0 * progress);
    const double noise = 0.08 * random.normal(experts * static_cast<uint64_t>(step + 1) + e);
    share[e] = std::exp(taste + noise);
  }
  const double sum = std::accumulate(share.begin(), share.end(), 0.0);
  LayerMetrics m;
  m.layer = layer;
  const auto assignments = static_cast<double>(run.tokens_per_step * run.top_k);
  for (const double s : share) m.counts.push_back(static_cast<int64_t>(assignments * s / sum));
  const double mean = assignments / static_cast<double>(run.num_experts);
  m.max_vio = static_cast<double>(*std::max_element(m.counts.begin(), m.counts.end())) / mean - 1;
  m.dead = std::count(m.counts.begin(), m.counts.end(), 0);
  m.entropy = std::log(static_cast<double>(run.num_experts)) * (1 - 0.35 * progress) -
              0.05 * static_cast<double>(layer);
  m.dropped = run.drop_share * std::exp(-5 * progress);
  m.bias_max = run.balanced ? 0.2 * std::sqrt(progress) * (1 + 0.2 * static_cast<double>(layer)) : 0;
  m.bias_min = -0.8 * m.bias_max;
  return m;
}

StepMetrics example_step(const ExampleRun& run, int64_t step) {
  const RandomStream random(run.seed, "steps");
  const auto index = static_cast<uint64_t>(step);
  const double progress = static_cast<double>(step) / static_cast<double>(run.num_steps);
  StepMetrics m;
  m.step = step;
  m.tokens = step * run.tokens_per_step;
  m.loss = run.final_loss + (10.8 - run.final_loss) * std::exp(-14 * std::sqrt(progress)) * 0.98 +
           0.07 * random.normal(index);
  m.aux_loss = 0.01 * (1 + 0.3 * std::exp(-6 * progress));
  m.learning_rate = 3e-3 * std::min(progress / 0.05, 0.55 + 0.45 * std::cos(3.14159 * progress));
  m.grad_norm = std::exp(1.5 * std::exp(-10 * progress) - 0.7 + 0.25 * random.normal(2 * index + 1));
  m.tokens_per_s = 14200 + 250 * random.normal(5 * index) - (step % 400 == 0 ? 4000 : 0);
  m.tflops = m.tokens_per_s * 6 * 9.2e6 / 1e12;
  m.mfu = m.tflops / 1.6;
  m.step_ms = 1000 * static_cast<double>(run.tokens_per_step) / m.tokens_per_s;
  m.peak_bytes = int64_t{1} << 30;
  for (int64_t l = 0; l < run.num_layers; l++)
    m.layers.push_back(example_layer(run, run.first_layer + l, step));
  for (const auto& layer : m.layers) {
    m.max_load = std::max(m.max_load, layer.max_vio + 1);
    m.dropped += layer.dropped / static_cast<double>(run.num_layers);
  }
  return m;
}

}  // namespace

void write_example_run(const std::filesystem::path& folder, const ExampleRun& run) {
  MetricsWriter writer(folder / "metrics.jsonl");
  writer.begin(-1);
  writer.write_run(
      str(R"({"name":")", run.name, R"(","params_total":21400000,"params_active":9200000,"world":2,)",
          R"("config":{"seed":)", run.seed, R"(,"model":{"layers":4,"width":256},"parallel":{"ep":2}}})"));
  for (int64_t step = 1; step <= run.num_steps; step++) {
    if (step % run.log_every == 0) writer.write(example_step(run, step));
    if (step % run.eval_every == 0)
      writer.write(EvalMetrics{step, 1 << 16, example_step(run, step).loss + 0.12});
  }
}

TEST(ReportExample, SameSeedGivesTheSameRow) {
  const ExampleRun run;
  EXPECT_EQ(example_step(run, 7).loss, example_step(run, 7).loss);
  EXPECT_NE(example_step(run, 7).loss, example_step(run, 8).loss);
  EXPECT_EQ(example_step(run, 7).layers.size(), 3U);
}

}  // namespace shoal::testing
