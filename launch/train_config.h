// TrainConfig: one experiment file. Sections: run, model, data, optim, parallel, eval, checkpoint. Loading
// checks everything that can be checked before data is read or memory allocated, and reports all problems at
// once.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/base/config.h"
#include "data/batch_loader.h"
#include "data/prepare.h"
#include "data/token_dataset.h"
#include "models/model.h"
#include "parallel/mesh.h"

namespace shoal {

struct RunOptions {
  std::string name;
  std::string folder = "runs";
  int64_t steps = 1000, seed = 1, log_every = 10, check_replicas = 0;
  std::string resume = "auto";
  AutoInt threads;
  std::string device = "cpu", precision = "f32", deterministic = "same_layout";
  bool allow_config_change = false;
  int64_t profile = 0, profile_after = kDefaultProfileAfter;
  static constexpr int64_t kDefaultProfileAfter = 3;
  DType dtype() const { return precision == "f64" ? DType::f64 : DType::f32; }  // of parameters
  bool bf16() const { return precision == "bf16"; }
  bool rank_invariant() const { return deterministic == "rank_invariant"; }
  void fields(FieldVisitor& v);
};

/// A prepared dataset folder in a blend.
struct SourceOptions {
  std::string path;
  double weight = 1;
  void fields(FieldVisitor& v);
};

struct DataOptions {
  std::vector<std::string> text;
  std::vector<SourceOptions> sources;
  std::string prepared;
  PrepareOptions prepare;  // text and output are filled from the fields above
  SplitOptions split;
  LoaderOptions loader;
  int64_t seq_len = 256, global_batch = 8;
  AutoInt micro_batch;
  void fields(FieldVisitor& v);
};

struct OptimOptions {
  double learning_rate = 1e-3, clip_norm = 1;
  Choice optimizer{"adamw", nullptr}, schedule{"cosine", nullptr};
  void fields(FieldVisitor& v);
};

struct EvalOptions {
  int64_t every = 0, samples = 256;
  bool at_end = true;
  void fields(FieldVisitor& v);
};

struct SaveOptions {
  int64_t every = 500, keep_last = 3, keep_every = 0;
  bool at_end = true;
  void fields(FieldVisitor& v);
};

struct TrainConfig {
  RunOptions run;
  Choice model{"transformer", nullptr};
  DataOptions data;
  OptimOptions optim;
  ParallelOptions parallel;
  EvalOptions eval;
  SaveOptions checkpoint;
  void fields(FieldVisitor& v);

  ModelOptions& model_options() const;
  std::string run_folder() const { return run.folder + "/" + run.name; }
};

struct LoadedConfig {
  TrainConfig config;
  ConfigNode tree;  // for origins
};

/// Reads an experiment file with "key=value" overrides. `world_size` <= 0: rules about the number of ranks
/// are left out. Throws one UsageError with every problem.
LoadedConfig load_train_config(const std::string& path, const std::vector<std::string>& overrides,
                               int world_size);
/// The same from text (a checkpoint's stored config).
LoadedConfig load_train_config_text(const std::string& text, const std::string& source,
                                    const std::vector<std::string>& overrides, int world_size);

/// What the config's layout must fit when it runs on so many ranks.
LayoutFacts layout_facts(const TrainConfig& config, int world_size);
/// The layout for a world size; the config must have been loaded for it.
ParallelLayout layout_of(const TrainConfig& config, int world_size);
/// data.micro_batch of each rank.
int64_t micro_batch_of(const TrainConfig& config, const ParallelLayout& layout);

/// Sequences per rank and forward pass: the same, or 1 with run.deterministic: rank_invariant.
int64_t sequences_per_pass(const TrainConfig& config, const ParallelLayout& layout);

/// The resolved config as YAML.
std::string to_yaml(const TrainConfig& config);

/// Dotted keys and values of a YAML text.
std::map<std::string, std::string> flat_settings(const std::string& yaml);
std::map<std::string, std::string> flat_settings(const ConfigNode& tree);

/// Keys whose values differ, "key: old -> new", split by whether a resumed run may differ in them.
struct ConfigChanges {
  std::vector<std::string> harmless, meaningful;
};
ConfigChanges compare_configs(const std::string& old_yaml, const std::string& new_yaml);

}  // namespace shoal
