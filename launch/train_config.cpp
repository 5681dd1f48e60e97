#include "launch/train_config.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "core/base/text.h"
#include "launch/rank_invariant.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"

namespace shoal {

namespace {
constexpr double kMaxRows = 1 << 30;  // the product of two stays far below 2^63
}

void RunOptions::fields(FieldVisitor& v) {
  v("name", name, "name of the run; default: the config file's name");
  v("folder", folder, "runs are stored in <folder>/<name>", not_empty());
  v("steps", steps, "optimizer steps of the whole training; 0: only evaluate and save",
    in_range(0, kMaxCount));
  v("seed", seed, "of weights (data order has its own: data.loader.seed)", at_least(0));
  v("log_every", log_every, "steps between lines of the log", in_range(1, kMaxCount));
  v("check_replicas", check_replicas,
    "steps between checks that ranks with the same piece of a tensor hold the same bits; 0: off",
    in_range(0, kMaxCount));
  v("resume", resume,
    "auto: from the newest good checkpoint if there is one; required: fail without one; never: refuse to "
    "start in a folder that has checkpoints",
    one_of({"auto", "required", "never"}));
  v("threads", threads, "threads per rank; auto: cores of this host / ranks on it", in_range(1, 1024));
  v("device", device, "where tensors live", one_of({"cpu", "cuda"}));
  v("precision", precision,
    "f32; bf16: bf16 activations and matrix products, f32 weights, sums, statistics and optimizer; f64: for "
    "exact "
    "comparisons",
    one_of({"f32", "bf16", "f64"}));
  v("deterministic", deterministic,
    "same_layout: the same bits whenever the same layout runs; rank_invariant: also for any dp, ep, pp and "
    "micro-batches, at the price of a pass for each sequence and more memory (docs/parallelism.md)",
    one_of({"same_layout", "rank_invariant"}));
  v("allow_config_change", allow_config_change,
    "resume although settings that change the result differ from the checkpoint's");
  v("profile", profile,
    "steps to profile: prints a table of where their time goes and writes a trace of each rank into the "
    "run's "
    "folder; 0: off",
    in_range(0, 1'000'000));
  v("profile_after", profile_after,
    "steps of this start before the profile begins (the first ones touch memory for the first time)",
    in_range(0, kMaxCount));
}

void SourceOptions::fields(FieldVisitor& v) {
  v("path", path, "folder written by `shoal prepare`", not_empty());
  v("weight", weight, "share of the samples, relative to the other sources", in_range(0, kMaxFactor));
}

void DataOptions::fields(FieldVisitor& v) {
  v("text", text, "text files and folders to train on; they are prepared on the first run", not_empty());
  v("sources", sources, "prepared datasets to blend, instead of text; the first one's tokenizer is used");
  v("prepared", prepared, "where prepared text is kept; default: <run.folder>/data/<run.name>");
  v("extensions", prepare.extensions, "endings of the files taken from folders", not_empty());
  v("documents", prepare.documents,
    "what one document is: a file, the lines between blank lines, or a JSONL line; auto: jsonl for *.jsonl, "
    "else file",
    one_of({"auto", "file", "blank_line", "jsonl"}));
  v("text_key", prepare.text_key, "key of the text in a JSONL line");
  v.choice("tokenizer", prepare.tokenizer, TokenizerTrainerRegistry::instance(),
           "trained on the text, or loaded");
  v("split", split, "held-out data");
  v("loader", loader, "order and packing of samples");
  v("seq_len", seq_len, "tokens per sequence", in_range(1, kMaxRows));
  v("global_batch", global_batch, "sequences per optimizer step, over all ranks", in_range(1, kMaxRows));
  v("micro_batch", micro_batch,
    "sequences per rank and forward pass; auto: global_batch / dp, with pipeline stages that in "
    "micro-batches",
    in_range(1, kMaxRows));
}

void OptimOptions::fields(FieldVisitor& v) {
  v("learning_rate", learning_rate, "peak of the schedule", in_range(kMinFactor, kMaxFactor));
  v("clip_norm", clip_norm, "the gradient is scaled down to this global norm; 0: never",
    in_range(0, kMaxFactor));
  v.choice("optimizer", optimizer, OptimizerRegistry::instance(), "update rule");
  v.choice("schedule", schedule, ScheduleRegistry::instance(), "learning rate over the steps");
}

void EvalOptions::fields(FieldVisitor& v) {
  v("every", every, "steps between evaluations on held-out data; 0: off", in_range(0, kMaxCount));
  v("samples", samples, "held-out sequences per evaluation, always the same ones; 0: all",
    in_range(0, kMaxCount));
  v("at_end", at_end, "evaluate after the last step");
}

void SaveOptions::fields(FieldVisitor& v) {
  v("every", every,
    "steps between checkpoints; 0: only at the end and on a stop signal, so that a kill loses the whole run",
    in_range(0, kMaxCount));
  v("keep_last", keep_last, "older checkpoints are removed; 0: keep all", in_range(0, kMaxCount));
  v("keep_every", keep_every, "checkpoints of steps that are multiples of this are kept for good; 0: none",
    in_range(0, kMaxCount));
  v("at_end", at_end, "save after the last step");
}

void TrainConfig::fields(FieldVisitor& v) {
  v("run", run, "the run as a whole");
  v.choice("model", model, ModelRegistry::instance(), "what is trained");
  v("data", data, "what it is trained on");
  v("optim", optim, "how it is trained");
  v("parallel", parallel, "how ranks share the work");
  v("eval", eval, "evaluation on held-out data");
  v("checkpoint", checkpoint, "saving");
}

ModelOptions& TrainConfig::model_options() const {
  auto* options = dynamic_cast<ModelOptions*>(model.options.get());
  SHOAL_CHECK(options != nullptr, "config model: kind ", model.kind, " has no options");
  return *options;
}

namespace {

void check_data(const TrainConfig& config, const ConfigNode& tree, ConfigErrors& errors) {
  const DataOptions& data = config.data;
  if (data.text.empty() && data.sources.empty()) {
    errors.add("data.text", origin_of(tree, "data"),
               "expected text files or prepared sources, got none; set data.text or data.sources");
  }
  if (!data.text.empty() && !data.sources.empty()) {
    errors.add("data.sources", origin_of(tree, "data.sources"),
               "expected either text or sources, got both; remove one");
  }
  if (data.split.split == "tail" && data.split.val_documents > 0) {
    errors.add("data.split.val_documents", origin_of(tree, "data.split.val_documents"),
               "has no meaning with split: tail; set val_fraction");
  }
  for (size_t i = 0; i < data.sources.size(); i++) {
    const std::string key = str("data.sources.", i, ".path");
    if (data.sources[i].path.empty())
      errors.add(key, origin_of(tree, key), "expected a folder written by `shoal prepare`, got none");
  }
  if (const auto* file = dynamic_cast<const TokenizerFileOptions*>(data.prepare.tokenizer.options.get());
      file != nullptr && file->path.empty()) {
    errors.add("data.tokenizer.path", origin_of(tree, "data.tokenizer"),
               "expected a tokenizer.json, got none");
  }
  double weight = 0;
  for (const SourceOptions& source : data.sources) weight += source.weight;
  if (!data.sources.empty() && weight <= 0) {
    errors.add("data.sources", origin_of(tree, "data.sources"), "expected at least one weight above 0");
  }
}

void check_run(const TrainConfig& config, const ConfigNode& tree, ConfigErrors& errors) {
  const std::string& name = config.run.name;
  constexpr size_t kMaxNameBytes = 200;  // file systems allow 255, and some names get an ending
  const bool odd =
      std::ranges::any_of(name, [](char c) { return c == '/' || (c >= 0 && c < ' ') || c == 127; });
  if (odd || name == "." || name == ".." || name.size() > kMaxNameBytes) {
    errors.add(
        "run.name", origin_of(tree, "run.name"),
        str("expected a plain folder name of at most ", kMaxNameBytes, " bytes, got '", shown(name), "'"));
  }
  if (config.run.profile == 0 && config.run.profile_after != RunOptions::kDefaultProfileAfter) {
    errors.add("run.profile_after", origin_of(tree, "run.profile_after"),
               "has no meaning with run.profile: 0; set run.profile to the number of steps to profile");
  }
  const double tokens = static_cast<double>(config.run.steps) *
                        static_cast<double>(config.data.global_batch) *
                        static_cast<double>(config.data.seq_len);
  constexpr double kMaxTokens = 9e18;  // they are counted in 64 bits
  if (tokens > kMaxTokens) {
    errors.add("run.steps", origin_of(tree, "run.steps"),
               str("steps x data.global_batch x data.seq_len is ", tokens, " tokens, expected at most ",
                   kMaxTokens, "; lower one of them"));
  }
}

bool mentions(const ConfigErrors& errors, const std::string& start) {
  return std::ranges::any_of(errors.messages(), [&](const std::string& m) { return m.starts_with(start); });
}

LoadedConfig finish(ConfigNode tree, const std::string& default_name, int world_size, ConfigErrors& errors) {
  LoadedConfig loaded;
  loaded.tree = std::move(tree);
  TrainConfig& config = loaded.config;
  config.model.options = ModelRegistry::instance().make_options(config.model.kind);
  const bool readable = errors.empty();
  parse_fields(
      loaded.tree, "", [&](FieldVisitor& v) { config.fields(v); }, errors);
  if (config.run.name.empty()) config.run.name = default_name;
  check_run(config, loaded.tree, errors);
  if (config.data.prepared.empty()) config.data.prepared = config.run.folder + "/data/" + config.run.name;
  config.data.prepare.text = config.data.text;
  config.data.prepare.output = config.data.prepared;
  // A file that could not be read has no data section to complain about.
  if (readable && !mentions(errors, "config data")) check_data(config, loaded.tree, errors);
  // Cross-field rules are only meaningful on values that are fine by themselves.
  if (errors.empty()) {
    config.model_options().check("model", loaded.tree, errors);
    check_rank_invariant(config, loaded.tree, errors);
    if (world_size > 0)
      resolve_layout(config.parallel, layout_facts(config, world_size), loaded.tree, errors);
  }
  errors.throw_if_any();
  return loaded;
}

}  // namespace

LoadedConfig load_train_config(const std::string& path, const std::vector<std::string>& overrides,
                               int world_size) {
  ConfigErrors errors;
  ConfigNode tree = load_yaml_file(path, errors);
  if (tree.entries.empty()) errors.throw_if_any();  // not readable: everything else would look missing
  for (const std::string& assignment : overrides) apply_override(tree, assignment, errors);
  return finish(std::move(tree), std::filesystem::path(path).stem().string(), world_size, errors);
}

LoadedConfig load_train_config_text(const std::string& text, const std::string& source,
                                    const std::vector<std::string>& overrides, int world_size) {
  ConfigErrors errors;
  ConfigNode tree = load_yaml_text(text, source, errors);
  for (const std::string& assignment : overrides) apply_override(tree, assignment, errors);
  return finish(std::move(tree), "run", world_size, errors);
}

LayoutFacts layout_facts(const TrainConfig& config, int world_size) {
  const auto optimizer = OptimizerRegistry::make(config.optim.optimizer, {});
  return {world_size, config.model_options().sizes(), config.data.global_batch,
          config.data.micro_batch.value_or(0),
          optimizer->needs_whole_matrices() ? config.optim.optimizer.kind : ""};
}

ParallelLayout layout_of(const TrainConfig& config, int world_size) {
  ConfigErrors errors;
  const ParallelLayout layout =
      resolve_layout(config.parallel, layout_facts(config, world_size), ConfigNode{}, errors);
  errors.throw_if_any();
  return layout;
}

int64_t micro_batch_of(const TrainConfig& config, const ParallelLayout& layout) {
  const int64_t sequences = config.data.global_batch / layout.dp;
  return config.data.micro_batch.value_or(sequences / auto_micro_batches(sequences, layout));
}

int64_t sequences_per_pass(const TrainConfig& config, const ParallelLayout& layout) {
  return config.run.rank_invariant() ? 1 : micro_batch_of(config, layout);
}

std::string to_yaml(const TrainConfig& config) {
  TrainConfig copy = config;
  return print_fields([&](FieldVisitor& v) { copy.fields(v); });
}

namespace {

void flatten(const ConfigNode& node, const std::string& path, std::map<std::string, std::string>& out) {
  switch (node.kind) {
    case ConfigNode::Kind::map:
      for (const auto& entry : node.entries)
        flatten(entry.value, path.empty() ? entry.key : path + "." + entry.key, out);
      break;
    case ConfigNode::Kind::list:
      for (size_t i = 0; i < node.items.size(); i++) flatten(node.items[i], str(path, ".", i), out);
      break;
    case ConfigNode::Kind::scalar:
      out[path] = node.scalar;
      break;
    case ConfigNode::Kind::null:
      out[path] = "null";
      break;
  }
}

bool may_differ(const std::string& key) {
  // Where the run goes, how it is watched, and how it is laid out; the layout never changes the result
  // (docs/design.md).
  for (const char* prefix :
       {"parallel.", "eval.", "checkpoint.", "run.name", "run.folder", "run.steps", "run.log_every",
        "run.check_replicas", "run.resume", "run.threads", "run.device", "run.allow_config_change",
        "run.profile", "data.micro_batch", "data.prepared", "model.recompute"}) {
    if (key.starts_with(prefix)) return true;
  }
  return false;
}

}  // namespace

std::map<std::string, std::string> flat_settings(const ConfigNode& tree) {
  std::map<std::string, std::string> settings;
  flatten(tree, "", settings);
  return settings;
}

std::map<std::string, std::string> flat_settings(const std::string& yaml) {
  ConfigErrors errors;
  const ConfigNode tree = load_yaml_text(yaml, "resolved config", errors);
  errors.throw_if_any();
  return flat_settings(tree);
}

ConfigChanges compare_configs(const std::string& old_yaml, const std::string& new_yaml) {
  const auto before = flat_settings(old_yaml), after = flat_settings(new_yaml);
  ConfigChanges changes;
  auto note = [&](const std::string& key, const std::string& from, const std::string& to) {
    (may_differ(key) ? changes.harmless : changes.meaningful).push_back(str(key, ": ", from, " -> ", to));
  };
  for (const auto& [key, value] : before) {
    auto it = after.find(key);
    if (it == after.end())
      note(key, value, "(absent)");
    else if (it->second != value)
      note(key, value, it->second);
  }
  for (const auto& [key, value] : after) {
    if (!before.contains(key)) note(key, "(absent)", value);
  }
  return changes;
}

}  // namespace shoal
