// A transformer built from a YAML flow map on one rank, for tests of models.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/transformer.h"
#include "parallel/mesh.h"

namespace shoal::testing {

/// Options from e.g. "layers: 2, hidden_size: 16".
inline std::shared_ptr<TransformerOptions> transformer_options(const std::string& settings) {
  auto options = std::make_shared<TransformerOptions>();
  ConfigErrors errors;
  const ConfigNode tree = load_yaml_text("{" + settings + "}", "test", errors);
  parse_fields(
      tree, "", [&](FieldVisitor& v) { options->fields(v); }, errors);
  options->check("", tree, errors);
  errors.throw_if_any();
  return options;
}

/// A model on one rank; keeps what it refers to alive.
struct TinyModel {
  TinyModel(const std::string& settings, int64_t vocab, int64_t seq, DType dtype = DType::f64,
            uint64_t seed = 5)
      : mesh(make_single_communicator(), ParallelLayout{}), options(transformer_options(settings)) {
    ModelContext context;
    context.build.bf16 = dtype == DType::bf16;  // mixed precision
    context.build.dtype = dtype == DType::bf16 ? DType::f32 : dtype;
    context.build.seed = seed;
    context.mesh = &mesh;
    context.dispatcher = &dispatcher;
    context.vocab_size = vocab;
    context.seq_len = seq;
    model = std::make_unique<Transformer>(*options, context);
  }
  Parameter& parameter(const std::string& name) const {
    for (Parameter* p : model->parameters()) {
      if (p->name == name) return *p;
    }
    std::string known;
    for (Parameter* p : model->parameters()) known += " " + p->name;
    throw Error("no parameter " + name + "; there are" + known);
  }

  Mesh mesh;
  Choice dispatcher{"local", nullptr};
  std::shared_ptr<TransformerOptions> options;
  std::unique_ptr<Transformer> model;
};

/// Rows of tokens with next-token labels (the last one ignored) and positions 0, 1, ...
inline ModelBatch batch_of(const std::vector<std::vector<int32_t>>& rows, Device device = {}) {
  ModelBatch batch;
  batch.batch = static_cast<int64_t>(rows.size());
  batch.seq = static_cast<int64_t>(rows.front().size());
  std::vector<int32_t> tokens, labels, positions;
  for (const auto& row : rows) {
    for (size_t s = 0; s < row.size(); s++) {
      tokens.push_back(row[s]);
      labels.push_back(s + 1 < row.size() ? row[s + 1] : -1);
      positions.push_back(static_cast<int32_t>(s));
    }
  }
  const Shape shape{batch.batch * batch.seq};
  batch.tokens_T = Tensor::from(tokens, shape, device);
  batch.labels_T = Tensor::from(labels, shape, device);
  batch.positions_T = Tensor::from(positions, shape, device);
  return batch;
}

}  // namespace shoal::testing
