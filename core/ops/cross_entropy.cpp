#include "core/ops/cross_entropy.h"

#include "core/autograd/tape.h"
#include "core/ops/elementwise.h"

namespace shoal {

namespace {

class CrossEntropyFunction final : public Function {
 public:
  explicit CrossEntropyFunction(double scale) : scale_(scale) {}
  const char* name() const override { return "cross_entropy"; }

  Tensor forward(const Tensor& logits, const Tensor& labels) {
    SHOAL_CHECK(labels.dtype() == DType::i32 && labels.numel() == logits.num_rows(),
                "cross_entropy: expected i32 labels, one for each of the ", logits.num_rows(),
                " rows of logits ", logits.shape(), ", got ", labels.dtype(), ' ', labels.shape());
    const double total =
        cross_entropy_fwd(logits.device(), CrossEntropy{logits, labels, scale_, needs_grad(0)});
    if (needs_grad(0)) dlogits_ = logits;
    Tensor loss = Tensor::empty({}, logits.dtype() == DType::f64 ? DType::f64 : DType::f32, logits.device());
    fill(loss.device(), loss, total * scale_);
    return loss;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    const double factor = dy[0].item();
    if (factor != 1) shoal::scale_fwd(dlogits_.device(), dlogits_, factor, dlogits_);
    return {dlogits_, {}};
  }

 private:
  double scale_;
  Tensor dlogits_;
};

}  // namespace

Tensor cross_entropy(const Tensor& logits_TV, const Tensor& labels_T, double scale) {
  return apply(CrossEntropyFunction(scale), logits_TV, labels_T);
}

}  // namespace shoal
