// What tests ask of the stand-in of cublasLt (cublaslt.cpp). Needs none of NVIDIA's headers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shoal::standin {

/// A call of cublasLtMatmul, in the terms of the library: column-major, A is m x k.
struct ProductCall {
  uint64_t m, n, k;
  void* stream;
  size_t workspace_bytes;
  int type_a, type_b;  // cudaDataType_t
};
/// The calls of all threads since the last question.
std::vector<ProductCall> take_product_calls();

/// The next call of `function` by any thread fails with `status` (a cublasStatus_t).
void fail_next_call(const std::string& function, int status);

/// Stands in for a card of this compute capability from now on: 90 (the default) for 9.0.
void set_compute_capability(int value);

}  // namespace shoal::standin
