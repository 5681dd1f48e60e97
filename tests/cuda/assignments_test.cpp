#include "core/ops/assignments.h"

#include "core/base/random.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

Tensor ids_of(int64_t tokens, int64_t top_k, int64_t experts) {
  const RandomStream random(5, "ids");
  std::vector<int32_t> ids;
  for (int64_t n = 0; n < tokens * top_k; n++) {
    const uint64_t bits = random.bits(static_cast<uint64_t>(n));
    ids.push_back(bits % 6 == 0 ? -1 : static_cast<int32_t>(bits / 8 % static_cast<uint64_t>(experts)));
  }
  return Tensor::from(ids, {tokens, top_k});
}

/// counts, slots, rows, choices; what is beyond the rows that exist is 0.
Tensors sorted(const Tensor& ids, int64_t experts, const Tensor& place_E = {}, int64_t rows_each = 0) {
  const Device device = ids.device();
  const int64_t rows = rows_each > 0 ? experts * rows_each : ids.numel();
  const SortAssignments s{ids,
                          Tensor::empty({experts}, DType::i64, device),
                          Tensor::empty(ids.shape(), DType::i64, device),
                          Tensor::zeros({rows}, DType::i64, device),
                          Tensor::zeros({rows}, DType::i64, device),
                          place_E,
                          rows_each};
  sort_assignments_fwd(device, s);
  return {s.counts_E, s.slots_TK, s.row_N, s.choice_N};
}

TEST(CudaAssignments, AreSortedLikeThoseOfTheCpu) {
  struct Sizes {
    int64_t tokens, top_k, experts;
  };
  // The last have more experts than a pass of the sort has digits.
  const Sizes sizes[] = {{0, 2, 3},    {1, 1, 1},      {300, 1, 1},  {120, 3, 8},
                         {257, 2, 40}, {100, 4, 5000}, {50, 2, 1024}};
  const NarrowLaunches narrow;
  for (const Sizes& size : sizes) {
    const int64_t experts = size.experts;
    const auto body = [&](const Tensors& in) { return sorted(in[0], experts); };
    const Tensors inputs = {ids_of(size.tokens, size.top_k, experts)};
    const Tensors got = device_results(inputs, body), want = body(inputs);
    for (size_t i = 0; i < got.size(); i++)
      EXPECT_TRUE(same_bits(got[i], want[i])) << experts << ", result " << i;
  }
  const Tensors large = {ids_of(700, 8, 64)};  // in blocks of the usual size
#ifndef SHOAL_EMULATOR_TSAN
  cuda::launch_limits() = {};
  const Tensors got = all_to(sorted(large[0].to(kCuda), 64), kCpu), want = sorted(large[0], 64);
  for (size_t i = 0; i < got.size(); i++) EXPECT_TRUE(same_bits(got[i], want[i])) << "result " << i;
#endif
}

TEST(CudaAssignments, ExpertsMayHaveAnOrderAndRowsOfTheirOwn) {
  const NarrowLaunches narrow;
  for (const int64_t experts : {1, 7, 40}) {
    std::vector<int32_t> place;  // from the last to the first, but for one
    for (int64_t e = 0; e < experts; e++) place.push_back(static_cast<int32_t>(experts - 1 - e));
    std::swap(place.front(), place[static_cast<size_t>(experts / 2)]);
    const Tensors inputs = {ids_of(90, 2, experts), Tensor::from(place, {experts})};
    for (const bool ordered : {false, true}) {
      for (const int64_t rows_each : {0, 180}) {
        const auto body = [&](const Tensors& in) {
          return sorted(in[0], experts, ordered ? in[1] : Tensor{}, rows_each);
        };
        const Tensors got = device_results(inputs, body), want = body(inputs);
        for (size_t i = 0; i < got.size(); i++)
          EXPECT_TRUE(same_bits(got[i], want[i])) << experts << ", " << rows_each << ", result " << i;
      }
    }
  }
}

TEST(CudaAssignments, AnExpertWithoutRoomIsReported) {
  const Tensors got = sorted(Tensor::from(std::vector<int32_t>{1, 0, 1, 1}, {4, 1}, kCuda), 2, {}, 2);
  EXPECT_NE(error_of([&] {
              got[0].to_vector<int64_t>();
            }).find("dispatch: an expert has more assignments than rows of its own (position 3)"),
            std::string::npos);
  EXPECT_EQ(got[1].to_vector<int64_t>(), (std::vector<int64_t>{2, 0, 3, -1}));
  EXPECT_EQ(got[2].to_vector<int64_t>(), (std::vector<int64_t>{1, -1, 0, 2}));
}

TEST(CudaAssignments, AnIdThatIsNoExpertIsReportedAndCountsAsDropped) {
  const Tensor ids = Tensor::from(std::vector<int32_t>{1, 0, -2, 1, 2, -1}, {3, 2}, kCuda);
  const Tensors got = sorted(ids, 2);
  EXPECT_NE(error_of([&] { got[0].to_vector<int64_t>(); })
                .find("cuda:0: dispatch: an expert id that is neither -1 (dropped) nor one of the experts "
                      "(position 2)"),
            std::string::npos);
  EXPECT_EQ(got[0].to_vector<int64_t>(), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(got[1].to_vector<int64_t>(), (std::vector<int64_t>{1, 0, -1, 2, -1, -1}));
}

TEST(CudaAssignments, BlocksMoveLikeOnTheCpu) {
  // {from, to, size}: sources 0, 1, 2 with experts a, b become a a a b b b.
  const Tensor moves = Tensor::from(
      std::vector<int64_t>{0, 0, 70, 70, 75, 1, 71, 70, 0, 71, 76, 3, 74, 70, 5, 79, 79, 2}, {6, 3});
  const auto body = [&](const Tensors& in) {
    const Tensor index = Tensor::empty({81}, DType::i64, in[0].device()), inverse = Tensor::empty_like(index);
    move_blocks(in[0].device(), in[0], index, inverse);
    return Tensors{index, inverse};
  };
  const NarrowLaunches narrow(32, 2);
  const Tensors got = device_results({moves}, body), want = body({moves});
  EXPECT_TRUE(same_bits(got[0], want[0]));
  EXPECT_TRUE(same_bits(got[1], want[1]));
}

}  // namespace
}  // namespace shoal::testing
