#include "core/ops/embedding.h"

#include "core/autograd/tape.h"

namespace shoal {

namespace {

class EmbeddingFunction final : public Function {
 public:
  explicit EmbeddingFunction(const TablePart& part) : part_(part) {}
  const char* name() const override { return "embedding"; }

  Tensor forward(const Tensor& weight, const Tensor& ids) {
    SHOAL_CHECK(weight.dims() == 2, "embedding: expected a table [V, D], got shape ", weight.shape());
    SHOAL_CHECK(ids.dtype() == DType::i32, "embedding: expected i32 ids, got ", ids.dtype());
    weight_shape_ = weight.shape();
    weight_dtype_ = weight.dtype();
    ids_ = ids;
    Tensor y = Tensor::empty({ids.numel(), weight.size(1)}, weight.dtype(), weight.device());
    embedding_fwd(weight.device(), weight, ids, y, part_);
    return y;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    Tensor dweight;
    const Tensor* leaf = leaf_grad(0, weight_shape_, ids_.device());
    if (leaf == nullptr) {
      const DType dtype = weight_dtype_ == DType::bf16 ? DType::f32 : weight_dtype_;
      dweight = Tensor::zeros(weight_shape_, dtype, ids_.device());
    }
    embedding_bwd(ids_.device(), dy[0], ids_, leaf != nullptr ? *leaf : dweight, part_);
    return {dweight, {}};
  }

 private:
  TablePart part_;
  Shape weight_shape_;
  DType weight_dtype_ = DType::f32;
  Tensor ids_;
};

}  // namespace

Tensor embedding(const Tensor& weight_VD, const Tensor& ids_T) {
  return embedding(weight_VD, ids_T, TablePart::whole(weight_VD));
}
Tensor embedding(const Tensor& weight_VD, const Tensor& ids_T, const TablePart& part) {
  return apply(EmbeddingFunction(part), weight_VD, ids_T);
}

}  // namespace shoal
