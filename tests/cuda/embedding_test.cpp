#include "core/ops/embedding.h"

#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

Tensor ids_of(int64_t count, int64_t vocab, uint64_t seed) {
  const RandomStream random(seed, "ids");
  std::vector<int32_t> ids;
  // Few ids, so that some come often and some never.
  for (int64_t t = 0; t < count; t++) {
    ids.push_back(static_cast<int32_t>(random.bits(static_cast<uint64_t>(t)) % static_cast<uint64_t>(vocab)) /
                  2);
  }
  return Tensor::from(ids, {count});
}

struct Sizes {
  int64_t tokens, vocab, width;
};
constexpr Sizes kSizes[] = {{0, 4, 8}, {1, 1, 1}, {7, 5, 3}, {200, 9, 40}, {150, 300, 257}, {300, 3000, 9}};

TEST(CudaEmbedding, RowsAndTheirGradientsHaveTheBitsOfTheCpu) {
  const NarrowLaunches narrow;
  for (const DType dtype : kFloats) {
    for (const auto& [tokens, vocab, width] : kSizes) {
      const Tensors inputs = {as(normal({vocab, width}, 1), dtype), as(normal({tokens, width}, 2), dtype),
                              as(normal({vocab, width}, 3), stats_dtype(dtype)), ids_of(tokens, vocab, 4)};
      const auto body = [&](const Tensors& in) {
        const Device device = in[0].device();
        const Tensor y = Tensor::empty_like(in[1]), dweight = in[2].clone();
        embedding_fwd(device, in[0], in[3], y, TablePart::whole(in[0]));
        embedding_bwd(device, in[1], in[3], dweight, TablePart::whole(dweight));
        return Tensors{y, dweight};
      };
      const Tensors got = device_results(inputs, body), want = body(inputs);
      EXPECT_TRUE(same_bits(got[0], want[0])) << dtype << ' ' << tokens;
      EXPECT_TRUE(same_bits(got[1], want[1])) << dtype << ' ' << tokens;
    }
  }
}

TEST(CudaEmbedding, APartOfTheTableGivesZerosForOtherRowsAndTakesNoGradientOfThem) {
  const NarrowLaunches narrow;
  for (const DType dtype : kFloats) {
    const int64_t tokens = 60, vocab = 11, width = 24;
    for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, 4}, {4, 7}, {2, 1}}) {
      const TablePart part{first, vocab};
      const Tensors inputs = {as(normal({rows, width}, 1), dtype), as(normal({tokens, width}, 2), dtype),
                              as(normal({rows, width}, 3), stats_dtype(dtype)), ids_of(tokens, 2 * vocab, 4)};
      const auto body = [&](const Tensors& in) {
        const Device device = in[0].device();
        const Tensor y = Tensor::empty_like(in[1]), dweight = in[2].clone();
        embedding_fwd(device, in[0], in[3], y, part);
        embedding_bwd(device, in[1], in[3], dweight, part);
        return Tensors{y, dweight};
      };
      const Tensors got = device_results(inputs, body), want = body(inputs);
      EXPECT_TRUE(same_bits(got[0], want[0]) && same_bits(got[1], want[1])) << dtype << ' ' << first;
    }
  }
}

TEST(CudaEmbedding, GradientsAreThoseOfAPlainLoop) {
  for (const auto& [tokens, vocab, width] : kSizes) {
    const Tensor dy = normal({tokens, width}, 2), ids = ids_of(tokens, vocab, 4);
    std::vector<double> want(static_cast<size_t>(vocab * width));
    const auto grads = to_doubles(dy), rows = to_doubles(ids);
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t d = 0; d < width; d++) {
        want[static_cast<size_t>(static_cast<int64_t>(rows[static_cast<size_t>(t)]) * width + d)] +=
            grads[static_cast<size_t>(t * width + d)];
      }
    }
    const Tensor dweight = Tensor::zeros({vocab, width}, DType::f64, kCuda);
    embedding_bwd(kCuda, dy.to(kCuda), ids.to(kCuda), dweight, TablePart::whole(dweight));
    EXPECT_TRUE(close(to_doubles(dweight), want, {1e-12, 1e-12}));
  }
}

TEST(CudaEmbedding, AnIdOutsideOfTheTableIsReportedAndGivesNan) {
  const Tensor weight = as(normal({4, 6}, 1), DType::f32).to(kCuda);
  const Tensor ids = Tensor::from(std::vector<int32_t>{1, 0, 4, -1, 2}, {5}, kCuda);
  const NarrowLaunches narrow;
  for_each_schedule([&](const std::string& schedule) {
    SCOPED_TRACE(schedule);
    const Tensor y = Tensor::empty({5, 6}, DType::f32, kCuda),
                 dweight = Tensor::zeros({4, 6}, DType::f32, kCuda);
    embedding_fwd(kCuda, weight, ids, y, TablePart::whole(weight));
    const char* message =
        "cuda:0: embedding: an id outside of the table; does the tokenizer's vocabulary fit the "
        "table? (position 2)";
    EXPECT_NE(error_of([&] { all_finite(y); }).find(message), std::string::npos);
    const auto values = to_doubles(y);
    for (size_t i = 0; i < values.size(); i++)
      EXPECT_EQ(std::isnan(values[i]), i / 6 == 2 || i / 6 == 3) << i;
    embedding_bwd(kCuda, as(normal({5, 6}, 2), DType::f32).to(kCuda), ids, dweight,
                  TablePart::whole(dweight));
    EXPECT_NE(error_of([&] { all_finite(dweight); }).find(message), std::string::npos);
    EXPECT_TRUE(all_finite(dweight));
  });
}

}  // namespace
}  // namespace shoal::testing
