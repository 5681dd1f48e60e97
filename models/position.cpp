#include "models/position.h"

#include <algorithm>
#include <cmath>

#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"

namespace shoal {

namespace {

class NoPosition final : public PositionEncoding {};

struct RopeOptions final : PositionOptions {
  std::string form = "half";
  double theta = 10000;
  int64_t rotary_size = 0;
  void fields(FieldVisitor& v) override {
    v("form", form, "which dimensions of a head turn together: half (i, i + C/2) or adjacent (2i, 2i + 1)",
      one_of({"half", "adjacent"}));
    v("theta", theta, "base of the rotation frequencies", above(1, kMaxFactor));
    v("rotary_size", rotary_size, "leading dimensions of each head that turn (even); 0: all",
      in_range(0, 1 << 20));
  }
  std::string problem(int64_t head_size) const override {
    const int64_t turning = rotary_size == 0 ? head_size : rotary_size;
    if (turning % 2 == 0 && turning <= head_size) return "";
    return rotary_size == 0
               ? str("rope: expected an even head size, got ", head_size, "; it turns pairs of dimensions")
               : str("rope: expected an even rotary_size of at most the head size (", head_size, "), got ",
                     rotary_size);
  }
};

/// Su et al., arXiv:2104.09864.
class Rope final : public PositionEncoding {
 public:
  Rope(const RopeOptions& o, const PositionContext& c) : head_size_(c.head_size), build_(c.build) {
    spec_.form = o.form == "half" ? RopeForm::half : RopeForm::adjacent;
    spec_.theta = o.theta;
    spec_.rotary_size = o.rotary_size;
    const std::string problem = o.problem(c.head_size);
    if (!problem.empty()) throw UsageError(problem);
    table_ = rope_table(spec_, head_size_, c.table_rows(), c.build.dtype, c.build.device);
  }
  // Generation may go beyond the training length; the table is a function of the position alone.
  void prepare(int64_t num_positions) override {
    if (num_positions <= table_.size(1)) return;
    table_ = rope_table(spec_, head_size_, std::max(num_positions, 2 * table_.size(1)), build_.dtype,
                        build_.device);
  }
  Tensor rotate(const Tensor& qkv, const AttentionSpec& spec, const Tensor& positions_T) override {
    return rope(qkv, spec, spec_, table_, positions_T);
  }

 private:
  RopeSpec spec_;
  int64_t head_size_;
  BuildContext build_;
  Tensor table_;
};

/// One trained vector per position.
class Learned final : public PositionEncoding {
 public:
  explicit Learned(const PositionContext& c) : limit_(c.seq_len) {
    weight_ = &add_parameter(c.build, "weight", Shape{c.seq_len, c.hidden_size}, Init::normal(c.init_std),
                             ParamKind::embedding);
  }
  Tensor embed(const Tensor& x_TD, const Tensor& positions_T) override {
    return add(x_TD, embedding(weight_->value, positions_T));
  }
  int64_t max_positions() const override { return limit_; }
  int64_t num_params() const override { return weight_->global_shape.numel(); }

 private:
  int64_t limit_;
  Parameter* weight_;
};

/// Vaswani et al., arXiv:1706.03762, section 3.5: sin and cos of position / 10000^(2i / D), interleaved.
class Sinusoidal final : public PositionEncoding {
 public:
  explicit Sinusoidal(const PositionContext& c) : size_(c.hidden_size), build_(c.build) {
    make_table(c.table_rows());
  }
  void prepare(int64_t num_positions) override {
    if (num_positions > table_.size(0)) make_table(std::max(num_positions, 2 * table_.size(0)));
  }
  Tensor embed(const Tensor& x_TD, const Tensor& positions_T) override {
    return add(x_TD, embedding(table_, positions_T));
  }

 private:
  void make_table(int64_t positions) {
    dispatch_float(build_.dtype, "sinusoidal", [&]<class T>() {
      std::vector<T> values(static_cast<size_t>(positions * size_));
      for (int64_t p = 0; p < positions; p++) {
        for (int64_t i = 0; i < size_; i++) {
          const int64_t first_of_pair = i / 2 * 2;
          const double angle =
              static_cast<double>(p) *
              std::pow(10000.0, -static_cast<double>(first_of_pair) / static_cast<double>(size_));
          values[static_cast<size_t>(p * size_ + i)] =
              static_cast<T>(i % 2 == 0 ? std::sin(angle) : std::cos(angle));
        }
      }
      table_ = Tensor::from(values, Shape{positions, size_}, build_.device);
    });
  }
  int64_t size_;
  BuildContext build_;
  Tensor table_;
};

class Alibi final : public PositionEncoding {
 public:
  explicit Alibi(const PositionContext& c)
      : slopes_(Tensor::from(alibi_slopes(c.heads), Shape{c.heads}, c.build.device)) {}
  void adjust(AttentionSpec& spec) const override { spec.alibi_slopes_H = slopes_; }

 private:
  Tensor slopes_;
};

template <class P>
std::unique_ptr<PositionEncoding> make(const NoOptions&, const PositionContext& c) {
  return std::make_unique<P>(c);
}
const bool registered[] = {
    PositionRegistry::add<NoOptions>(
        "none", "no position information but the causal mask",
        [](const NoOptions&, const PositionContext&) { return std::make_unique<NoPosition>(); }),
    PositionRegistry::add<RopeOptions>(
        "rope", "rotary embedding of queries and keys (arXiv:2104.09864)",
        [](const RopeOptions& o, const PositionContext& c) { return std::make_unique<Rope>(o, c); }),
    PositionRegistry::add<NoOptions>(
        "learned", "one trained vector per position, added to the token embedding", &make<Learned>),
    PositionRegistry::add<NoOptions>(
        "sinusoidal", "fixed sines and cosines added to the token embedding (arXiv:1706.03762)",
        &make<Sinusoidal>),
    PositionRegistry::add<NoOptions>("alibi", "scores fall linearly with distance (arXiv:2108.12409)",
                                     &make<Alibi>),
};

}  // namespace

}  // namespace shoal
