// shoal eval, shoal generate.
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "core/base/log.h"
#include "core/base/text.h"
#include "launch/command_support.h"
#include "launch/commands.h"
#include "launch/console.h"
#include "launch/generate.h"
#include "launch/same_settings.h"
#include "parallel/bootstrap.h"

namespace shoal {

namespace {

constexpr double kMaxTokens = 1 << 24;  // the cache of keys and values is allocated at the start

struct RunArguments {
  std::string run;
  int64_t step = -1;
  std::vector<std::string> settings;
  std::optional<int64_t> wanted_step() const { return step < 0 ? std::nullopt : std::optional(step); }
};

void add_run_arguments(CLI::App& command, RunArguments& arguments) {
  command.add_option("run", arguments.run, "run folder, or the config it was trained with")->required();
  command.add_option("settings", arguments.settings, "key=value pairs that override the run's config");
  command.add_option("--step", arguments.step, "checkpoint of this step; default: the newest")
      ->check(number_in(0, 1e18));
}

const RunUse kEvalUse{"eval",
                      {"run.threads", "run.device", "run.precision", "model", "data", "parallel.dp",
                       "parallel.tp", "parallel.pp", "parallel.ep", "parallel.dispatcher",
                       "parallel.ranks_per_node", "parallel.cp", "parallel.context", "eval.samples"},
                      /*shares_sequences=*/true};
const RunUse kGenerateUse{
    "generate",
    {"run.threads", "run.device", "run.precision", "model", "parallel.dp", "parallel.tp", "parallel.pp",
     "parallel.ep", "parallel.dispatcher", "parallel.ranks_per_node"}};

/// Losses on tokens of another tokenizer mean nothing: a config that asks for one is refused, and other text
/// is encoded with the run's own, beside the data of the training, before anything is prepared.
void keep_tokenizer(TrainedRun& run) {
  TrainConfig& config = run.loaded.config;
  const std::string own = run_tokenizer_path(run.folder), stored = run.folder + "/config.yaml";
  if (config.data.text.empty() || !std::filesystem::exists(own) || !std::filesystem::exists(stored)) return;
  const LoadedConfig trained = load_train_config(stored, {}, 0);
  const auto before = flat_settings(to_yaml(trained.config)), now = flat_settings(to_yaml(config));
  const auto same = [&](const std::string& prefix) {
    const auto part = [&](const std::map<std::string, std::string>& all) {
      std::map<std::string, std::string> out;
      for (const auto& entry : all) {
        if (entry.first.starts_with(prefix)) out.insert(entry);
      }
      return out;
    };
    return part(before) == part(now);
  };
  const bool same_text = same("data.text") && same("data.extensions") && same("data.documents");
  Choice& tokenizer = config.data.prepare.tokenizer;
  if (!same("data.tokenizer")) {
    const bool equal =
        tokenizer.kind == "file" && TokenizerTrainerRegistry::make(tokenizer)->train().tokenizer->to_json() ==
                                        load_tokenizer(own)->to_json();
    if (!equal)
      throw UsageError(
          str("config data.tokenizer (", origin_of(run.loaded.tree, "data.tokenizer").text(),
              "): expected the run's own tokenizer (", own,
              "), because losses with another one would mean nothing; leave data.tokenizer out"));
  } else if (same_text) {
    return;
  } else {
    auto file = std::make_shared<TokenizerFileOptions>();
    file->path = own;
    tokenizer = Choice{"file", file};
  }
  if (!same("data.prepared")) return;
  config.data.prepared += "-eval";
  config.data.prepare.output = config.data.prepared;
}

int eval(const CLI::App& command, const RunArguments& arguments) {
  const std::vector<std::string> overrides = overrides_from(command, arguments.settings);
  return run_world([&](const std::shared_ptr<Communicator>& world) {
    TrainedRun run = open_run(arguments.run, overrides, world->size(), kEvalUse);
    check_kernel_choice();
    require_same_settings(run.loaded.config, *world);
    apply_threads(run.loaded.config);
    keep_tokenizer(run);
    const TrainData data = open_data(run.loaded.config, run.loaded.tree, *world);
    if (open_tokenizer(run)->to_json() != data.tokenizer->to_json()) {
      throw UsageError(str("eval ", run.folder,
                           ": the data is prepared with another tokenizer than the run (",
                           run_tokenizer_path(run.folder),
                           "); its losses would mean nothing; name the data of the run, or set "
                           "data.tokenizer to {kind: file, path: ",
                           run_tokenizer_path(run.folder), "}"));
    }
    TrainedModel model = load_trained_model(run, data.vocab_size, arguments.wanted_step(), world);
    const EvalMetrics metrics = evaluate_model(*model.engine, data, run.loaded.config, model.step);
    if (world->rank() == 0) log::info(eval_line(metrics));
    // No labels is an answer; a loss that is no number is a broken model.
    const bool usable = metrics.tokens == 0 || std::isfinite(metrics.loss);
    return static_cast<int>(usable ? ExitCode::done : ExitCode::failure);
  });
}

struct GenerateArguments : RunArguments {
  std::string prompt = "\n", stop;
  GenerateOptions options;
};

int generate_text(const CLI::App& command, const GenerateArguments& arguments) {
  const std::vector<std::string> overrides = overrides_from(command, arguments.settings);
  return run_world([&](const std::shared_ptr<Communicator>& world) {
    TrainedRun run = open_run(arguments.run, overrides, world->size(), kGenerateUse);
    check_kernel_choice();
    require_same_settings(run.loaded.config, *world);
    apply_threads(run.loaded.config);
    const auto tokenizer = open_tokenizer(run);
    const int64_t vocab = run.loaded.config.model_options().vocab_size.value_or(tokenizer->vocab_size());
    TrainedModel model = load_trained_model(run, vocab, arguments.wanted_step(), world);
    GenerateOptions options = arguments.options;
    options.stop_token = tokenizer->end_of_document();
    if (!arguments.stop.empty()) {
      options.stop_token = tokenizer->token_id(arguments.stop);
      if (!options.stop_token)
        throw UsageError(str("--stop: '", arguments.stop, "' is not one token of this tokenizer"));
    }
    std::vector<int32_t> prompt;
    encode_with_special_tokens(*tokenizer, arguments.prompt, prompt);
    check_prompt(model.engine->model(), prompt);
    const bool speaks = world->rank() == 0;
    if (speaks) std::fwrite(arguments.prompt.data(), 1, arguments.prompt.size(), stdout);
    generate(model.engine->model(), prompt, options, [&](int32_t token) {
      if (!speaks || token >= tokenizer->vocab_size()) return;
      const std::string_view bytes = tokenizer->token_bytes(token);
      std::fwrite(bytes.data(), 1, bytes.size(), stdout);
      std::fflush(stdout);
    });
    if (speaks) std::fputc('\n', stdout);
    return static_cast<int>(ExitCode::done);
  });
}

}  // namespace

void add_eval_command(CLI::App& app, CommandAction& action) {
  CLI::App* command =
      app.add_subcommand("eval", "Loss of a trained model on its held-out data, under any number of ranks");
  add_help(
      *command,
      "Other text than the run's is encoded with the run's tokenizer; overrides that change nothing here "
      "are refused.",
      "  shoal eval runs/quickstart\n"
      "  shoal eval runs/quickstart --step 400 eval.samples=0\n"
      "  shoal eval runs/quickstart 'data.text=[other.txt]'");
  auto arguments = std::make_shared<RunArguments>();
  add_run_arguments(*command, *arguments);
  command->callback([=, &action] { action = [=] { return eval(*command, *arguments); }; });
}

void add_generate_command(CLI::App& app, CommandAction& action) {
  CLI::App* command = app.add_subcommand("generate", "Continue a prompt with a trained model");
  add_help(
      *command, "Overrides that change nothing here are refused.",
      "  shoal generate runs/quickstart --prompt \"The function returns\" --temperature 0.8 --top-p 0.9");
  auto a = std::make_shared<GenerateArguments>();
  add_run_arguments(*command, *a);
  SamplingOptions& sampling = a->options.sampling;
  command->add_option("--prompt", a->prompt, "text to continue; default: a new line");
  command->add_option("--tokens", a->options.max_tokens, "tokens to generate at most")
      ->check(number_in(0, kMaxTokens))
      ->capture_default_str();
  command->add_option("--temperature", sampling.temperature, "0: always the most likely token")
      ->check(number_in(0, 1e9))
      ->capture_default_str();
  command->add_option("--top-k", sampling.top_k, "draw from the k most likely tokens; 0: all")
      ->check(number_in(0, 1e9))
      ->capture_default_str();
  command->add_option("--top-p", sampling.top_p, "draw from the most likely tokens that together reach p")
      ->check(number_in(0, 1))
      ->capture_default_str();
  command->add_option("--seed", sampling.seed, "of the draws")->capture_default_str();
  command->add_option("--stop", a->stop, "stop at this token; default: end of document");
  command->callback([=, &action] { action = [=] { return generate_text(*command, *a); }; });
}

}  // namespace shoal
