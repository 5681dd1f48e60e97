// Products as the stand-in of cublasLt sees them: what lies in the semi-opaque structs of the real header,
// and the calculation itself. For cublaslt.cpp.
#pragma once

#include <cublasLt.h>

#include <cstring>

namespace shoal::standin {

enum class Kind : uint64_t { how = 0x51, layout, preference, algorithm };
struct How {
  Kind kind;
  cublasComputeType_t compute;
  cudaDataType_t scale;
  int32_t transpose_a, transpose_b;
  int32_t scale_mode_a, scale_mode_b;
  const void *scale_a, *scale_b;
};
struct Layout {
  Kind kind;
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t ld;
};
struct Preference {
  Kind kind;
  uint64_t max_workspace;
  uint32_t reductions;
  uint32_t alignment[4];
};
struct Algorithm {
  Kind kind;
  cublasComputeType_t compute;
  int32_t transposes, scale_modes;
  uint32_t types;      // of A, B and C
  uint32_t alignment;  // that all pointers must have
  uint32_t parts;
};
static_assert(sizeof(How) <= sizeof(cublasLtMatmulDescOpaque_t));
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t));
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

template <class T, class Opaque>
T read(const Opaque* from) {
  T value;
  std::memcpy(static_cast<void*>(&value), from, sizeof value);
  return value;
}
template <class T, class Opaque>
void write(Opaque* to, const T& value) {
  std::memset(to, 0, sizeof *to);
  std::memcpy(to, &value, sizeof value);
}

/// A product as the descriptors say it: D[m, n] = op(A)[m, k] op(B)[k, n], column-major.
struct Problem {
  How how;
  Layout a, b, c;
  uint64_t m, n, k;
};

/// The compute capability of the card, 90 for 9.0: which fp8 products there are.
int& compute_capability();

/// What the descriptors say; otherwise what is wrong with them.
cublasStatus_t understand(cublasLtMatmulDesc_t how, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                          cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, Problem& p);

bool is_fp8(cudaDataType_t type);
uint32_t types_of(const Problem& p);
/// An algorithm for products like p, of which all pointers have this alignment.
Algorithm algorithm_for(const Problem& p, uint32_t alignment, uint32_t parts);
/// Bytes that the sums of a first part take.
size_t workspace_for(const Problem& p, uint32_t parts);
/// Whether an algorithm was chosen for products like p.
bool fits(const Algorithm& algorithm, const Problem& p);

/// A product that is to be calculated.
struct Work {
  Problem problem;
  uint32_t parts;
  double alpha, beta;
  const void *a, *b, *c;
  void *d, *workspace;
};

/// D = alpha op(A) op(B) + beta C, by plain loops. The sums of the first of two parts pass through the
/// workspace.
void calculate(const Work& work);

}  // namespace shoal::standin
