#include "optim/optimizer.h"

namespace shoal {

void DecayRule::fields(FieldVisitor& v) {
  v("weight_decay", weight_decay,
    "decoupled weight decay of matrices and routers (never of norms and biases)", in_range(0, 1e3));
  v("decay_embeddings", decay_embeddings, "decay token and position embeddings too");
}

double DecayRule::of(const Parameter& parameter) const {
  switch (parameter.kind) {
    case ParamKind::matrix:
    case ParamKind::router:
      return weight_decay;
    case ParamKind::embedding:
      return decay_embeddings ? weight_decay : 0;
    case ParamKind::norm:
    case ParamKind::bias:
      return 0;
  }
  return 0;
}

Tensor make_state(const Parameter& parameter) {
  return Tensor::zeros(parameter.value.shape(), parameter.leaf.grad_dtype, parameter.value.device());
}

}  // namespace shoal
