#include "core/ops/embedding.h"

#include "core/autograd/tape.h"

namespace shoal {

namespace {

class EmbeddingFunction final : public Function {
 public:
  const char* name() const override { return "embedding"; }

  Tensor forward(const Tensor& weight, const Tensor& ids) {
    SHOAL_CHECK(weight.dims() == 2, "embedding: expected a table [V, D], got shape ", weight.shape());
    SHOAL_CHECK(ids.dtype() == DType::i32, "embedding: expected i32 ids, got ", ids.dtype());
    weight_shape_ = weight.shape();
    weight_dtype_ = weight.dtype();
    ids_ = ids;
    Tensor y = Tensor::empty({ids.numel(), weight.size(1)}, weight.dtype(), weight.device());
    embedding_fwd(weight.device(), weight, ids, y);
    return y;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    Tensor dweight;
    const Tensor* leaf = leaf_grad(0, weight_shape_, ids_.device());
    if (leaf == nullptr) {
      const DType dtype = weight_dtype_ == DType::bf16 ? DType::f32 : weight_dtype_;
      dweight = Tensor::zeros(weight_shape_, dtype, ids_.device());
    }
    embedding_bwd(ids_.device(), dy[0], ids_, leaf != nullptr ? *leaf : dweight);
    return {dweight, {}};
  }

 private:
  Shape weight_shape_;
  DType weight_dtype_ = DType::f32;
  Tensor ids_;
};

}  // namespace

Tensor embedding(const Tensor& weight_VD, const Tensor& ids_T) {
  return apply(EmbeddingFunction{}, weight_VD, ids_T);
}

}  // namespace shoal
