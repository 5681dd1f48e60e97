// Options of the transformer: fields, what `auto` means, parameter and FLOP counts, cross-field rules.
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "core/base/text.h"
#include "models/transformer.h"

namespace shoal {

namespace {

constexpr int64_t kFp8Multiple = 16;  // of widths, for cublasLt's fp8 products

}  // namespace

void FfnOptions::fields(FieldVisitor& v) {
  v.choice("activation", activation, FfnActivationRegistry::instance(),
           "activation of dense FFNs and experts");
  v("hidden", hidden, "width F of dense FFNs; auto: 8/3 D rounded up to 128 when gated, else 4 D",
    in_range(1, 1 << 24));
}

void NormOptions::fields(FieldVisitor& v) {
  v("kind", kind, "normalisation", one_of({"rms_norm", "layer_norm"}));
  v("placement", placement, "pre: x + f(norm(x)), with a final norm; post: norm(x + f(x))",
    one_of({"pre", "post"}));
  v("eps", eps, "added to the variance", in_range(kMinFactor, 1));
}

void InitOptions::fields(FieldVisitor& v) {
  v("std", std, "standard deviation of the normal initialisation of all matrices", in_range(kMinFactor, 1e3));
  v("scale_residual", scale_residual,
    "divide it by sqrt(2 * layers) for projections into the residual stream (GPT-2)");
}

void TransformerOptions::fields(FieldVisitor& v) {
  v("layers", layers, "number of blocks", in_range(1, 1 << 16));
  v("vocab_size", vocab_size, "rows of the embedding; auto: the tokenizer's vocabulary",
    in_range(1, 1 << 30));
  v("hidden_size", hidden_size, "width D of the residual stream", in_range(1, 1 << 24));
  v("heads", heads, "query heads", in_range(1, 1 << 20));
  v("kv_heads", kv_heads, "key/value heads; fewer than heads: grouped-query, 1: multi-query; auto: heads",
    in_range(1, 1 << 20));
  v("head_size", head_size, "size C of one head; auto: hidden_size / heads", in_range(1, 1 << 20));
  v("bias", bias, "biases in projections, FFNs and layer norms");
  v("tie_embeddings", tie_embeddings, "the LM head is the token embedding");
  v("recompute", recompute,
    "what is made again instead of being kept: results of norms, of activations and up projections of FFNs "
    "and "
    "experts; a whole block, from its input; bf16 copies of weights (docs/performance.md has bytes and "
    "times)",
    one_of({"none", "norms", "activations", "up_projections", "packed_weights", "block"}));
  v("norm", norm, "normalisation layers");
  v.choice("position", position, PositionRegistry::instance(), "how positions enter");
  v("ffn", ffn, "feed-forward networks");
  v("moe", moe, "mixture-of-experts layers");
  v("init", init, "initialisation");
}

ModelSizes TransformerOptions::sizes() const {
  const AttentionShape attention = attention_shape();
  ModelSizes sizes{num_experts(), attention.heads, attention.kv_heads, 0, 0};
  const auto consider = [&](int64_t width) {
    sizes.narrowest_ffn = sizes.narrowest_ffn == 0 ? width : std::min(sizes.narrowest_ffn, width);
  };
  sizes.layers = layers;
  sizes.pads_experts = num_moe_layers() > 0 && moe.pad_to_capacity;
  if (num_moe_layers() < layers) consider(ffn_hidden());
  if (num_moe_layers() > 0 && shared_hidden() > 0) consider(shared_hidden());
  if (num_moe_layers() > 0) sizes.expert_width = expert_hidden();
  if (moe.fp8()) sizes.width_multiple = kFp8Multiple;
  return sizes;
}

AttentionShape TransformerOptions::attention_shape() const {
  const int64_t size = head_size.value_or(heads > 0 ? hidden_size / heads : 1);
  return {hidden_size, heads, kv_heads.value_or(heads), size, bias, init.std, output_init_std()};
}

NormShape TransformerOptions::norm_shape() const {
  return {hidden_size, norm.kind == "layer_norm", bias, norm.eps, recomputed().norms};
}

Recompute TransformerOptions::recomputed() const {
  const auto has = [this](const char* what) { return std::ranges::find(recompute, what) != recompute.end(); };
  return {has("norms"), has("activations"), has("up_projections"), has("block"), has("packed_weights")};
}

double TransformerOptions::output_init_std() const {
  return init.scale_residual ? init.std / std::sqrt(2.0 * static_cast<double>(layers)) : init.std;
}

namespace {
bool is_gated(const Choice& activation) {
  return FfnActivationRegistry::make(activation)->gated();
}
int64_t ffn_params(int64_t D, int64_t F, bool gated, bool bias) {
  return D * F * (gated ? 3 : 2) + (bias ? (gated ? 2 : 1) * F + D : 0);
}
}  // namespace

int64_t TransformerOptions::ffn_hidden() const {
  return ffn.hidden.value_or(auto_ffn_hidden(hidden_size, is_gated(ffn.activation)));
}
int64_t TransformerOptions::expert_hidden() const {
  return moe.hidden.value_or((ffn_hidden() / moe.top_k + 7) / 8 * 8);
}
int64_t TransformerOptions::shared_hidden() const {
  return moe.shared_experts * moe.shared_hidden.value_or(expert_hidden());
}
int64_t TransformerOptions::num_moe_layers() const {
  int64_t count = 0;
  for (int64_t l = 0; l < layers; l++) count += moe.is_moe_layer(l);
  return count;
}
double TransformerOptions::layer_cost(int64_t layer, int64_t seq_len) const {
  const AttentionShape attention = attention_shape();
  const auto D = static_cast<double>(hidden_size);
  const auto per_ffn = D * (is_gated(ffn.activation) ? 3 : 2);
  // Projections, and half of q k^T and p v: a token attends to (S + 1) / 2 keys on average, counted as S / 2.
  double cost = static_cast<double>((attention.heads + attention.kv_heads) * 2 * attention.head_size) * D +
                static_cast<double>(seq_len) * static_cast<double>(attention.heads * attention.head_size);
  if (!moe.is_moe_layer(layer)) return cost + per_ffn * static_cast<double>(ffn_hidden());
  cost += per_ffn * static_cast<double>(moe.top_k * expert_hidden() + shared_hidden());
  return cost + static_cast<double>(moe.router_params(hidden_size) + (moe.shared_gate ? hidden_size : 0));
}

std::vector<int64_t> TransformerOptions::stage_layers(const ParallelLayout& layout, int64_t vocab_size,
                                                      int64_t seq_len) const {
  if (!layout.pipeline.layers.empty()) return layout.pipeline.layers;
  std::vector<double> costs;
  for (int64_t l = 0; l < layers; l++) costs.push_back(layer_cost(l, seq_len));
  // An embedding reads and writes rows, a head multiplies with all of the table.
  const auto embedding = static_cast<double>(hidden_size), head = embedding * static_cast<double>(vocab_size);
  return balanced_stages(costs, embedding, head, layout.num_stages());
}

double TransformerOptions::largest_share(const ParallelLayout& layout, int64_t vocab_size,
                                         int64_t seq_len) const {
  const std::vector<StageLayers> stages = stage_ranges(stage_layers(layout, vocab_size, seq_len));
  std::vector<int64_t> all(static_cast<size_t>(layout.pp), 0), sparse = all;  // of each rank
  for (size_t stage = 0; stage < stages.size(); stage++) {
    for (int64_t l = stages[stage].begin; l < stages[stage].end; l++) {
      all[stage % all.size()]++;
      sparse[stage % all.size()] += moe.is_moe_layer(l);
    }
  }
  const auto share = [](const std::vector<int64_t>& counts, int64_t of) {
    return of == 0 ? 0 : static_cast<double>(*std::ranges::max_element(counts)) / static_cast<double>(of);
  };
  return std::max(share(all, layers), share(sparse, num_moe_layers()));
}

int64_t TransformerOptions::num_experts() const {
  return num_moe_layers() > 0 ? moe.num_experts : 0;
}

ModelFacts TransformerOptions::facts(int64_t vocab_size, int64_t seq_len) const {
  const int64_t D = hidden_size, V = vocab_size;
  const AttentionShape attention = attention_shape();
  const bool gated = is_gated(ffn.activation);
  ModelFacts facts;
  const int64_t learned = position.kind == "learned" ? seq_len * D : 0;
  facts.params_embedding = V * D + learned;
  facts.params_head = tie_embeddings ? 0 : V * D;
  int64_t total = facts.params_embedding + facts.params_head;
  int64_t idle = 0;                                   // parameters of experts that a token does not use
  double multiply_adds = static_cast<double>(V * D);  // per token: matrix products and attention scores
  const int64_t norms = norm_shape().num_params();
  for (int64_t l = 0; l < layers; l++) {
    int64_t dense = attention.num_params() + 2 * norms, experts = 0;
    multiply_adds += layer_cost(l, seq_len);
    if (moe.is_moe_layer(l)) {
      const int64_t E = moe.num_experts, one = ffn_params(D, expert_hidden(), gated, bias);
      experts = E * one;
      dense += moe.router_params(D);
      idle += (E - moe.top_k) * one;
      if (shared_hidden() > 0)
        dense += ffn_params(D, shared_hidden(), gated, bias) + (moe.shared_gate ? D : 0);
    } else {
      dense += ffn_params(D, ffn_hidden(), gated, bias);
    }
    total += dense + experts;
    facts.params_expert += experts;
    facts.params_layer_dense = std::max(facts.params_layer_dense, dense);
    facts.params_layer_expert = std::max(facts.params_layer_expert, experts);
  }
  if (norm.placement == "pre") total += norms;
  facts.params_total = total;
  facts.params_active = total - idle;
  facts.flops_forward = 2 * multiply_adds;
  facts.flops_backward = 2 * facts.flops_forward;
  return facts;
}

namespace {

/// The options of a choice, or those of its kind by default; null when they are of another type.
template <class T>
std::shared_ptr<const T> options_of(const Choice& choice, const ChoiceSet& set) {
  return std::dynamic_pointer_cast<const T>(choice.options ? choice.options : set.make_options(choice.kind));
}

}  // namespace

/// About the matrix parameters of all layers, at least; a double, because they may not fit an int64.
double TransformerOptions::size_bound() const {
  const auto product = [](std::initializer_list<int64_t> factors) {
    double value = 1;
    for (const int64_t f : factors) value *= static_cast<double>(f);
    return value;
  };
  const AttentionShape attention = attention_shape();
  const double projections = product({4, attention.heads, attention.head_size, hidden_size});
  const double dense = product({3, hidden_size, ffn_hidden()});
  const double experts = product({3, hidden_size, expert_hidden(), moe.num_experts}) +
                         product({3, hidden_size, shared_hidden()});
  return static_cast<double>(layers) * (projections + std::max(dense, experts));
}

std::string TransformerOptions::fp8_problem(const ConfigNode& root) const {
  if (!moe.fp8()) return "";
  const ConfigNode* run = root.find("run");
  const ConfigNode* precision = run != nullptr ? run->find("precision") : nullptr;
  if (precision != nullptr && precision->scalar == "f64")
    return "expected same with run.precision: f64; fp8 would round what f64 is there to compare exactly";
  for (const auto& [what, width] : {std::pair{"hidden_size", hidden_size}, {"moe.hidden", expert_hidden()}}) {
    if (width % kFp8Multiple == 0) continue;
    return str("fp8 products need widths that are multiples of ", kFp8Multiple, ", got ", what, ' ', width,
               "; set it to ", (width + kFp8Multiple - 1) / kFp8Multiple * kFp8Multiple, " or use same");
  }
  return "";
}

std::vector<LayoutDependence> TransformerOptions::layout_dependences() const {
  std::vector<LayoutDependence> all;
  if (num_moe_layers() == 0) return all;
  if (moe.capacity_factor > 0 && moe.capacity_scope == "micro_batch")
    all.push_back({"moe.capacity_scope", "expected sequence, got micro_batch; set capacity_scope: sequence"});
  if (moe.fp8()) {
    all.push_back({"moe.expert_precision",
                   str("expected same, because fp8 scales look at the rows of all sequences that meet in an "
                       "expert, got ",
                       moe.expert_precision, "; set expert_precision: same")});
  }
  if (const auto options = options_of<RouterOptions>(moe.router, RouterRegistry::instance())) {
    if (const std::string fix = options->layout_dependence(); !fix.empty())
      all.push_back({"moe.router", fix});
  }
  return all;
}

void TransformerOptions::check(const std::string& path, const ConfigNode& root, ConfigErrors& errors) const {
  auto add = [&](const std::string& key, const std::string& problem) {
    const std::string full = path + "." + key;
    errors.add(full, origin_of(root, full), problem);
  };
  constexpr double kMaxParameters = 1e15;  // so that all counts fit an int64
  if (size_bound() > kMaxParameters) {
    errors.add(path, origin_of(root, path),
               str("expected less than 1e15 parameters, got about ", size_bound(),
                   "; lower layers, hidden_size, heads, the widths or num_experts"));
    return;
  }
  if (recompute.size() > 1 && std::ranges::find(recompute, "none") != recompute.end())
    add("recompute", "expected none alone, got it with others; remove it");
  const int64_t kv = kv_heads.value_or(heads);
  if (!head_size.value && hidden_size % heads != 0) {
    add("heads", str("expected a divisor of hidden_size (", hidden_size, "), got ", heads,
                     "; change it or set head_size"));
  }
  if (heads % kv != 0) {
    add("kv_heads",
        str("expected a divisor of heads (", heads, "), got ", kv, "; queries share keys in equal groups"));
  }
  if (const auto options = options_of<PositionOptions>(position, PositionRegistry::instance())) {
    const std::string problem = options->problem(attention_shape().head_size);
    if (!problem.empty())
      add(problem.find("rotary_size") == std::string::npos ? "head_size" : "position", problem);
  }
  if (moe.num_experts == 0) {
    if (moe.shared_experts > 0)
      add("moe.shared_experts", "expected 0 without MoE layers; set moe.num_experts or remove it");
    if (moe.fp8())
      add("moe.expert_precision", "expected same without MoE layers; set moe.num_experts or remove it");
    return;
  }
  if (const std::string problem = fp8_problem(root); !problem.empty()) add("moe.expert_precision", problem);
  if (moe.top_k > moe.num_experts) {
    add("moe.top_k", str("expected 1..num_experts (", moe.num_experts, "), got ", moe.top_k,
                         "; lower top_k or raise num_experts"));
  }
  if (const auto options = options_of<RouterOptions>(moe.router, RouterRegistry::instance());
      options && moe.top_k <= moe.num_experts) {
    const std::string problem = options->problem(moe.num_experts, moe.top_k);
    if (!problem.empty()) add("moe.router", problem);
  }
  if (moe.pad_to_capacity && moe.capacity_factor == 0)
    add("moe.pad_to_capacity", "expected a moe.capacity_factor above 0: without one there is no capacity");
  for (const int64_t l : moe.layers) {
    if (l < 0 || l >= layers)
      add("moe.layers", str("expected layers 0..", layers - 1, ", got ", l, "; layers count from 0"));
  }
  if (num_moe_layers() == 0) {
    add("moe", str("num_experts is ", moe.num_experts, " but no layer is an MoE layer (layers ", layers,
                   ", first_dense ", moe.first_dense, ", every ", moe.every,
                   "); lower first_dense or every, or set num_experts: 0"));
  }
  if (moe.shared_gate && moe.shared_experts == 0) {
    add("moe.shared_gate", "expected shared_experts >= 1; there is nothing to gate");
  }
}

}  // namespace shoal
