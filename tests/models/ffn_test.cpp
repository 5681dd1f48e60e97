// The registered activations of feed-forward networks against their formulas, and the default widths.
#include "models/ffn.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tests/support/expect_close.h"

namespace shoal::testing {
namespace {

double silu(double x) {
  return x / (1 + std::exp(-x));
}
double gelu(double x) {
  return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
}

void expect_activation(const char* kind, const std::function<double(double)>& f, bool gated) {
  const auto activation = FfnActivationRegistry::make({kind, nullptr});
  EXPECT_EQ(activation->gated(), gated) << kind;
  constexpr int64_t kRows = 3, kF = 5;
  const int64_t width = gated ? 2 * kF : kF;
  std::vector<double> h(static_cast<size_t>(kRows * width)), want;
  for (size_t i = 0; i < h.size(); i++) h[i] = 3 * std::sin(1.7 * static_cast<double>(i));
  for (int64_t r = 0; r < kRows; r++) {
    for (int64_t i = 0; i < kF; i++) {
      const double* row = h.data() + r * width;
      want.push_back(gated ? f(row[i]) * row[kF + i] : f(row[i]));
    }
  }
  const Tensor y = activation->forward(Tensor::from(h, Shape{kRows, width}));
  EXPECT_EQ(y.shape(), (Shape{kRows, kF})) << kind;
  EXPECT_TRUE(close(to_doubles(y), want, {1e-12, 1e-12})) << kind;
}

TEST(FfnActivation, GatedKindsMultiplyTheActivatedGateByTheUpProjection) {
  expect_activation("swiglu", silu, true);
  expect_activation("geglu", gelu, true);
}

TEST(FfnActivation, PlainKindsActOnEveryElement) {
  expect_activation("silu", silu, false);
  expect_activation("gelu", gelu, false);
  expect_activation(
      "relu", [](double x) { return x > 0 ? x : 0; }, false);
}

TEST(FfnActivation, AnUnknownKindIsRefusedWithTheKnownOnes) {
  try {
    FfnActivationRegistry::make({"swiglo", nullptr});
    FAIL() << "expected an error";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("swiglu"), std::string::npos) << e.what();
  }
}

TEST(Ffn, DefaultWidthKeepsTheNumberOfParameters) {
  EXPECT_EQ(auto_ffn_hidden(768, false), 3072);
  EXPECT_EQ(auto_ffn_hidden(768, true), 2048);
  EXPECT_EQ(auto_ffn_hidden(100, true), 384);  // 266.7, rounded up to 128
}

}  // namespace
}  // namespace shoal::testing
