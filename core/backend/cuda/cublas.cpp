// cublasLt knows column-major matrices. A row-major matrix is the transpose of the column-major one in the
// same memory, so c = op(a) op(b) is computed as c^T = op(b)^T op(a)^T: cublasLt's A is our b, its m is our
// n.
#include "core/backend/cuda/cublas.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <bit>
#include <exception>
#include <map>
#include <optional>
#include <unordered_map>

#include "core/backend/cuda/runtime.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/stream.h"
#include "core/tensor/tensor.h"

namespace shoal::cuda {

namespace {

constexpr uint64_t kMaxWorkspace = uint64_t{32} << 20;  // what cuBLAS itself takes on sm_90
constexpr int kSideStreams = 3;
constexpr size_t kMaxChoices = 4096;  // about 1 MB; a model has some dozens
constexpr int64_t kMaxSize = INT32_MAX;

ProductCounts& counts() {
  static thread_local ProductCounts of_thread;
  return of_thread;
}

bool is_fp8(const Product& p) {
  return p.operands == DType::u8;
}

cudaDataType_t data_type(DType dtype) {
  return dtype == DType::bf16 ? CUDA_R_16BF : dtype == DType::f64 ? CUDA_R_64F : CUDA_R_32F;
}
cudaDataType_t data_type(const Product& p, const Fp8Reading& of) {
  if (!is_fp8(p)) return data_type(p.operands);
  return of.format == Fp8Format::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}

std::string text_of(const Product& p) {
  const auto matrix = [](const std::string& type, int64_t rows, int64_t columns, bool transposed) {
    return str(type, " [", transposed ? columns : rows, ", ", transposed ? rows : columns, ']',
               transposed ? "^T" : "");
  };
  const auto operand = [&](const Fp8Reading& of) {
    constexpr const char* kKinds[] = {"", " (scales of vectors)", " (scales of blocks)"};
    return is_fp8(p) ? str(fp8_name(of.format), kKinds[static_cast<size_t>(of.kind)]) : str(p.operands);
  };
  return str(matrix(operand(p.fp8_a), p.m, p.k, p.transpose_a), " x ",
             matrix(operand(p.fp8_b), p.k, p.n, p.transpose_b), p.accumulate ? " added to " : " -> ",
             matrix(str(p.result), p.m, p.n, false));
}

const char* advice(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_NOT_INITIALIZED:
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "is there a card with free memory and a driver for this version of CUDA (nvidia-smi)?";
    case CUBLAS_STATUS_NOT_SUPPORTED:
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return "this card or version of cuBLAS has no such product; try precision f32, or another cuBLAS";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "an earlier kernel may have failed; run again with CUDA_LAUNCH_BLOCKING=1";
    default:
      return "CUBLASLT_LOG_LEVEL=5 makes the library say more";
  }
}

void check(cublasStatus_t status, const char* call, const Product& p) {
  SHOAL_CHECK(status == CUBLAS_STATUS_SUCCESS, "cublasLt: ", call, " failed with ",
              cublasLtGetStatusName(status), " for ", text_of(p), "; ", advice(status));
}

/// The description of a product that cublasLt asks for. Must not move.
struct Description {
  cublasLtMatmulDescOpaque_t how;
  cublasLtMatrixLayoutOpaque_t a, b, c;  // a, b: cublasLt's

  explicit Description(const Product& p) {
    const bool f64 = p.operands == DType::f64;
    check(cublasLtMatmulDescInit(&how, f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                 f64 ? CUDA_R_64F : CUDA_R_32F),
          "cublasLtMatmulDescInit", p);
    set(CUBLASLT_MATMUL_DESC_TRANSA, int32_t{p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N}, p);
    set(CUBLASLT_MATMUL_DESC_TRANSB, int32_t{p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N}, p);
    if (is_fp8(p)) {
      set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(p.fp8_b.kind), p);
      set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(p.fp8_a.kind), p);
      set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(p.fp8_b.scales), p);
      set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(p.fp8_a.scales), p);
    }
    init_layout(a, data_type(p, p.fp8_b), p.transpose_b ? p.k : p.n, p.transpose_b ? p.n : p.k, p);
    init_layout(b, data_type(p, p.fp8_a), p.transpose_a ? p.m : p.k, p.transpose_a ? p.k : p.m, p);
    init_layout(c, data_type(p.result), p.n, p.m, p);
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t which, T value, const Product& p) {
    check(cublasLtMatmulDescSetAttribute(&how, which, &value, sizeof value), "cublasLtMatmulDescSetAttribute",
          p);
  }
  static int32_t scale_mode(Fp8Scales kind) {
    return kind == Fp8Scales::matrix   ? CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F
           : kind == Fp8Scales::vector ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                       : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  }
  /// rows: of the column-major matrix, that is, neighbours in memory.
  static void init_layout(cublasLtMatrixLayoutOpaque_t& layout, cudaDataType_t type, int64_t rows,
                          int64_t columns, const Product& p) {
    check(cublasLtMatrixLayoutInit(&layout, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                                   rows),
          "cublasLtMatrixLayoutInit", p);
  }
};

/// Everything on which the choice of an algorithm may depend: the leading dimensions follow from the sizes.
struct ChoiceKey {
  int64_t m, n, k;
  uint64_t rest;
  bool operator==(const ChoiceKey&) const = default;
};
struct ChoiceHash {
  size_t operator()(const ChoiceKey& key) const {
    uint64_t hash = key.rest;
    for (const int64_t size : {key.m, key.n, key.k})
      hash = (hash ^ static_cast<uint64_t>(size)) * 0x9E3779B97F4A7C15ULL;
    return hash ^ hash >> 32;
  }
};

/// The bytes to which `data` is aligned; more than 16 make no difference to any algorithm.
uint32_t alignment(const void* data) {
  return uint32_t{1} << std::min(4, std::countr_zero(reinterpret_cast<uintptr_t>(data) | 16U));
}

ChoiceKey key_of(const Product& p) {
  uint64_t rest = 0;
  const auto add = [&](uint64_t value, unsigned bits) { rest = rest << bits | value; };
  for (const void* data : {p.a, p.b, static_cast<const void*>(p.c)}) add(alignment(data), 5);
  for (const bool flag : {p.transpose_a, p.transpose_b, p.accumulate}) add(flag ? 1 : 0, 1);
  for (const DType dtype : {p.operands, p.result}) add(static_cast<uint64_t>(dtype), 3);
  for (const Fp8Reading& of : {p.fp8_a, p.fp8_b}) {
    add(static_cast<uint64_t>(of.format), 1);
    add(static_cast<uint64_t>(of.kind), 2);
  }
  return {p.m, p.n, p.k, rest};
}

/// The part of cublasLt that belongs to a thread and a device.
class Library {
 public:
  explicit Library(Device device) : device_(device) {
    for (Stream& stream : side_) stream = make_stream(device);
    const cublasStatus_t status = cublasLtCreate(&handle_);
    SHOAL_CHECK(status == CUBLAS_STATUS_SUCCESS, "cublasLt: cublasLtCreate failed on ", device, " with ",
                cublasLtGetStatusName(status), "; ", advice(status));
  }
  ~Library() { cublasLtDestroy(handle_); }  // its status would help nobody
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  int64_t workspace_bytes() const {
    int64_t bytes = 0;
    for (const auto& [stream, workspace] : workspaces_) bytes += workspace.num_bytes();
    return bytes;
  }
  const Stream& side(int i) const { return side_[static_cast<size_t>(i)]; }

  bool knows(const Product& p) {
    const Product top = top_of(p);
    Description description(top);
    return answer(top, description).state == CUBLAS_STATUS_SUCCESS;
  }

  void run(const Product& p, const Stream& stream) {
    if (p.m == 0 || p.n == 0) return;
    if (p.k == 0) return write_empty_sum(p, stream);
    SHOAL_CHECK(p.m <= kMaxSize && p.n <= kMaxSize && p.k <= kMaxSize, "cublasLt: expected sizes up to ",
                kMaxSize, ", got ", text_of(p), "; make the micro-batch or the matrix smaller");
    Description description(p);
    const cublasLtMatmulHeuristicResult_t choice = choose(p, description);
    const bool f64 = p.operands == DType::f64;
    const double one64 = 1, add64 = p.accumulate ? 1 : 0;
    const float one32 = 1, add32 = p.accumulate ? 1 : 0;
    const void* one = f64 ? static_cast<const void*>(&one64) : &one32;
    const void* add = f64 ? static_cast<const void*>(&add64) : &add32;
    void* workspace = workspace_of(stream, choice.workspaceSize);
    counts().products++;
    check(cublasLtMatmul(handle_, &description.how, one, p.b, &description.a, p.a, &description.b, add, p.c,
                         &description.c, p.c, &description.c, &choice.algo, workspace, choice.workspaceSize,
                         reinterpret_cast<cudaStream_t>(stream.handle)),
          "cublasLtMatmul", p);
  }

 private:
  static void write_empty_sum(const Product& p, const Stream& stream) {
    if (p.accumulate) return;
    const StreamScope scope(stream);
    device_runtime(DeviceType::cuda).set_zero(p.c, p.m * p.n * dtype_size(p.result));
  }

  /// The algorithm for p and the workspace that it needs. Of a ragged product the choice is made for the top
  /// of the range in which its size lies: so it does not depend on which sizes came before.
  cublasLtMatmulHeuristicResult_t choose(const Product& p, Description& description) {
    const Product top = top_of(p);
    if (top.m == p.m && top.k == p.k) return remembered(p, description);
    Description of_top(top);
    const cublasLtMatmulHeuristicResult_t choice = remembered(top, of_top);
    cublasLtMatmulHeuristicResult_t here{};
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(handle_, &description.how, &description.a, &description.b, &description.c,
                                &description.c, &choice.algo, &here);
    if (status != CUBLAS_STATUS_SUCCESS) return remembered(p, description);
    here.algo = choice.algo;
    return here;
  }

  static Product top_of(const Product& p) {
    Product top = p;
    if (p.ragged == Product::Ragged::m) top.m = ragged_range(p.m);
    if (p.ragged == Product::Ragged::k) top.k = ragged_range(p.k);
    return top;
  }

  cublasLtMatmulHeuristicResult_t remembered(const Product& p, Description& description) {
    const cublasLtMatmulHeuristicResult_t choice = answer(p, description);
    check(choice.state, "cublasLtMatmulAlgoGetHeuristic", p);
    return choice;
  }

  /// The library's answer, which is that it has no such product when the state says so. For fp8 that is
  /// remembered as well: it is asked about again and again.
  cublasLtMatmulHeuristicResult_t answer(const Product& p, Description& description) {
    const ChoiceKey key = key_of(p);
    const auto found = choices_.find(key);
    if (found != choices_.end()) return found->second;
    const cublasLtMatmulHeuristicResult_t choice = ask(p, description);
    if (choice.state != CUBLAS_STATUS_SUCCESS && !is_fp8(p)) return choice;
    if (choices_.size() >= kMaxChoices) choices_.clear();
    return choices_[key] = choice;
  }

  cublasLtMatmulHeuristicResult_t ask(const Product& p, Description& description) {
    cublasLtMatmulPreferenceOpaque_t preference;
    check(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit", p);
    const auto prefer = [&]<class T>(cublasLtMatmulPreferenceAttributes_t which, T value) {
      check(cublasLtMatmulPreferenceSetAttribute(&preference, which, &value, sizeof value),
            "cublasLtMatmulPreferenceSetAttribute", p);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMaxWorkspace);
    // Parts of a sum are added in f32, in order: a bf16 result is rounded once.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.b));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.c));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.c));
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    counts().choices++;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_, &description.how, &description.a, &description.b,
                                       &description.c, &description.c, &preference, 1, &result, &found);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "cublasLtMatmulAlgoGetHeuristic", p);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || found == 0) result.state = CUBLAS_STATUS_NOT_SUPPORTED;
    return result;
  }

  /// Products on different streams may run at the same time: each stream has its own.
  void* workspace_of(const Stream& stream, size_t bytes) {
    if (bytes == 0) return nullptr;
    Tensor& workspace = workspaces_[stream.handle];
    if (!workspace || static_cast<size_t>(workspace.num_bytes()) < bytes) {
      const StreamScope scope(stream);
      workspace = Tensor::empty({static_cast<int64_t>(std::bit_ceil(bytes))}, DType::u8, device_);
    }
    return workspace.bytes();
  }

  Device device_;
  cublasLtHandle_t handle_ = nullptr;
  std::array<Stream, kSideStreams> side_;
  std::unordered_map<ChoiceKey, cublasLtMatmulHeuristicResult_t, ChoiceHash> choices_;
  std::map<int64_t, Tensor> workspaces_;
};

Library& library_of(Device device) {
  static thread_local std::map<int, Library> libraries;
  return libraries.try_emplace(device.index, device).first->second;
}

bool is_empty(const Product& p) {
  return p.m == 0 || p.n == 0;
}

/// The streams over which products are spread: the current one, and those of this thread behind it.
class Spread {
 public:
  Spread(Library& library, const Stream& current, int64_t products)
      : library_(library),
        current_(current),
        sides_(static_cast<int>(std::clamp<int64_t>(products - 1, 0, kSideStreams))) {
    if (sides_ == 0) return;
    Event ready;
    ready.record(current_);
    for (int i = 0; i < sides_; i++) ready.wait(library_.side(i));
  }
  /// In turn.
  const Stream& next() {
    const int i = turn_;
    turn_ = (turn_ + 1) % (sides_ + 1);
    return i == 0 ? current_ : library_.side(i - 1);
  }
  /// Later work of the current stream waits for all of them. When that cannot be said, the host waits
  /// instead, and then throws: the caller's tensors may be gone afterwards.
  void join() {
    std::exception_ptr first;
    for (int i = 0; i < sides_; i++) {
      try {
        Event done;
        done.record(library_.side(i));
        done.wait(current_);
      } catch (...) {
        if (first == nullptr) first = std::current_exception();
        cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(library_.side(i).handle));
      }
    }
    if (first != nullptr) std::rethrow_exception(first);
  }

 private:
  Library& library_;
  Stream current_;
  int sides_, turn_ = 0;
};

}  // namespace

const ProductCounts& product_counts() {
  return counts();
}

int64_t product_workspace_bytes(Device device) {
  return library_of(device).workspace_bytes();
}

int64_t ragged_range(int64_t size) {
  constexpr int64_t kFinest = 16;
  const auto quarter = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(size)) / 4);
  const int64_t step = std::max(kFinest, quarter);
  return (size + step - 1) / step * step;
}

bool can_multiply(Device device, const Product& product) {
  return library_of(device).knows(product);
}

void multiply(Device device, std::span<const Product> products, bool in_order) {
  const auto work = std::ranges::count_if(products, [](const Product& p) { return !is_empty(p); });
  if (work == 0) return;
  Library& library = library_of(device);
  Spread streams(library, current_stream(device), in_order ? 1 : work);
  std::exception_ptr failure;
  try {
    for (const Product& p : products) {
      if (!is_empty(p)) library.run(p, streams.next());
    }
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    streams.join();  // also after a failure: the caller's tensors are still read there
  } catch (...) {
    if (failure == nullptr) failure = std::current_exception();
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace shoal::cuda
