// The config struct that the config tests parse, print and explain: every field type, nesting, a list of
// sections, and a choice with two kinds that share an option name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/config.h"
#include "core/base/registry.h"

namespace shoal::test {

struct Gadget {
  virtual ~Gadget() = default;
  virtual std::string name() const = 0;
};
using GadgetRegistry = Registry<Gadget, int>;

struct TopKOptions : Options {
  int64_t top_k = 2;
  std::string score = "softmax";
  double scale = 1.0;
  void fields(FieldVisitor& v) override {
    v("top_k", top_k, "experts per token", at_least(1));
    v("score", score, "how scores are made", one_of({"softmax", "sigmoid"}));
    v("scale", scale, "factor on the weights", greater_than(0));
  }
};

struct HashOptions : Options {
  int64_t seed = 1;
  double scale = 3.0;
  void fields(FieldVisitor& v) override {
    v("seed", seed, "seed of the hash");
    v("scale", scale, "factor on the weights");
  }
};

struct Source {
  std::string path;
  double weight = 1;
  std::vector<std::string> tags;
  void fields(FieldVisitor& v) {
    v("path", path, "file to read");
    v("weight", weight, "share of the samples", at_least(0));
    v("tags", tags, "free words");
  }
};

struct Moe {
  Choice router{"top_k", nullptr};
  int64_t num_experts = 8;
  void fields(FieldVisitor& v) {
    v.choice("router", router, GadgetRegistry::instance(), "sends tokens to experts");
    v("num_experts", num_experts, "number of routed experts", in_range(1, 4096));
  }
};

struct Model {
  int64_t layers = 4;
  AutoInt hidden;
  bool tied = true;
  std::string name = "base";
  Moe moe;
  void fields(FieldVisitor& v) {
    v("layers", layers, "number of blocks", at_least(1));
    v("hidden", hidden, "width of the FFN", at_least(1));
    v("tied", tied, "share the embedding with the head");
    v("name", name, "shown in logs");
    v("moe", moe, "mixture of experts");
  }
};

struct Example {
  Model model;
  double lr = 1e-4;
  double dropout = 0;
  std::vector<int64_t> sizes = {1, 2};
  std::vector<double> betas = {0.9, 0.95};
  std::vector<std::string> files;
  std::vector<Source> sources;
  void fields(FieldVisitor& v) {
    v("model", model, "the network");
    v("lr", lr, "peak learning rate", greater_than(0));
    v("dropout", dropout, "share of activations set to zero", in_range(0, 1));
    v("sizes", sizes, "some sizes", at_least(0));
    v("betas", betas, "moment decay rates", in_range(0, 1));
    v("files", files, "input files");
    v("sources", sources, "data sources");
  }
  std::function<void(FieldVisitor&)> visitor() {
    return [this](FieldVisitor& v) { fields(v); };
  }
};

/// The problems of parsing `node` (or the text) into `example`, on top of the reader's own.
std::vector<std::string> problems_of(const ConfigNode& node, Example& example);
std::vector<std::string> problems_of(const std::string& text, Example& example);
/// The one problem of the text; a test failure when there is not exactly one.
std::string problem_of(const std::string& text);
/// Whether a message reads "config PATH (exp.yaml:LINE:COLUMN): PROBLEM".
bool names_place(const std::string& message);
/// Parses a text that must be right.
Example parsed(const std::string& text);

}  // namespace shoal::test
