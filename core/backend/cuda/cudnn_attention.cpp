#include "core/backend/cuda/cudnn_attention.h"

#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include "core/backend/cuda/cudnn_attention_graphs.h"
#include "core/backend/cuda/cudnn_library.h"
#include "core/backend/cuda/library_attention.h"
#include "core/backend/cuda/runtime.h"
#include "core/base/log.h"
#include "core/tensor/stream.h"

namespace shoal::cuda {

namespace {

struct Plan {
  CudnnObject object;
  int64_t workspace = 0;
  std::string name;
};

/// Tensors and host numbers of one execution.
struct Arguments {
  std::vector<int64_t> ids;
  std::vector<void*> pointers;
  void add(AttentionTensor id, const void* data) {
    ids.push_back(static_cast<int64_t>(id));
    pointers.push_back(const_cast<void*>(data));
  }
};

/// The part of cuDNN that belongs to a thread and a device.
class Library {
 public:
  explicit Library(Device device) : device_(device) {
    std::string why;
    functions_ = cudnn_library(&why);
    if (functions_ == nullptr)
      throw UsageError(
          str("SHOAL_ATTENTION=cudnn: ", why, "; install cuDNN, or leave SHOAL_ATTENTION unset"));
    use_device();
    check_cudnn(functions_->create(&handle_), str("start on ", device));
  }
  ~Library() {
    plans_.clear();
    functions_->destroy(handle_);  // its status would help nobody
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  /// Null when cuDNN does not take the shape.
  const Plan* plan_for(const CudnnAttention& shape, bool backward) {
    const auto key = std::pair(shape, backward);
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second ? &*found->second : nullptr;
    if (plans_.size() >= cudnn_limits().plans) return nullptr;
    std::optional<Plan>& plan = plans_[key];
    std::string why;
    plan = make(backward ? attention_backward_graph(shape) : attention_forward_graph(shape), &why);
    if (!plan) log::info("attention by our own kernels, since cuDNN does not take it: ", why);
    return plan ? &*plan : nullptr;
  }

  void run(const Plan& plan, const Arguments& arguments) {
    const Stream stream = current_stream(device_);
    check_cudnn(functions_->set_stream(handle_, reinterpret_cast<cudaStream_t>(stream.handle)),
                "stream for " + plan.name);
    Tensor workspace;  // may be used by others as soon as this is in the stream
    if (plan.workspace > 0) workspace = Tensor::empty({plan.workspace}, DType::u8, device_);
    execute(handle_, plan.object, arguments.ids, arguments.pointers, workspace ? workspace.bytes() : nullptr,
            plan.name);
  }

 private:
  /// The fastest engine that says to be deterministic and wants no more memory than it may.
  std::optional<Plan> make(const CudnnGraph& graph, std::string* why) const {
    const CudnnTarget target{handle_, nullptr};
    *why = graph.name() + ": no engine";
    try {
      for (const CudnnEngine& engine : graph.engines(target)) {
        if (!engine.deterministic()) continue;
        if (engine.workspace_bytes() > cudnn_limits().workspace_bytes) {
          *why = str(graph.name(), ": an engine with the same bits each time wants ",
                     engine.workspace_bytes(), " bytes, more than ", cudnn_limits().workspace_bytes);
          continue;
        }
        if (std::optional<Plan> plan = make(graph, engine, why)) return plan;
      }
    } catch (const CudnnError& error) {
      if (!error.refused()) throw;
      *why = error.what();
    }
    return std::nullopt;
  }
  std::optional<Plan> make(const CudnnGraph& graph, const CudnnEngine& engine, std::string* why) const {
    try {
      const CudnnObject plan = engine.plan({handle_, nullptr}, graph.name());
      return Plan{plan, plan_workspace_bytes(plan), graph.name()};
    } catch (const CudnnError& error) {
      if (!error.refused()) throw;
      *why = error.what();
      return std::nullopt;
    }
  }

  Device device_;
  const CudnnLibrary* functions_ = nullptr;
  cudnnHandle_t handle_ = nullptr;
  std::map<std::pair<CudnnAttention, bool>, std::optional<Plan>> plans_;
};

Library& library_of(Device device) {
  static thread_local std::map<int, Library> libraries;
  return libraries.try_emplace(device.index, device).first->second;
}

/// What the graphs can say, and pointers that the engines can read.
bool fits(const AttentionSpec& spec, std::initializer_list<const Tensor*> rows) {
  if (spec.batch == 0 || spec.seq == 0 || spec.document_BS.defined()) return false;
  const auto alignment = static_cast<uintptr_t>(cudnn_alignment(CUDNN_DATA_BFLOAT16));
  for (const Tensor* tensor : rows) {
    if (reinterpret_cast<uintptr_t>(tensor->bytes()) % alignment != 0) return false;
  }
  return spec.head_size * dtype_size(DType::bf16) % static_cast<int64_t>(alignment) == 0;
}

/// What a call has besides its tensors, in the host's memory.
struct Numbers {
  float scale, lowest = -std::numeric_limits<float>::infinity(), one = 1;
  explicit Numbers(const AttentionSpec& spec)
      : scale(static_cast<float>(spec.scale != 0 ? spec.scale
                                                 : 1 / std::sqrt(static_cast<double>(spec.head_size)))) {}
};

/// The arguments that both passes have, of call i.
Arguments arguments_of(const CudnnCalls& calls, int64_t i, const Tensor& qkv, const AttentionSpec& spec,
                       const Tensor& y, const Tensor& lse, const Numbers& numbers) {
  const int64_t per = spec.heads / spec.kv_heads;
  const BFloat16* q = qkv.data<BFloat16>() + i * calls.qkv_step;
  Arguments out;
  out.add(AttentionTensor::q, q);
  out.add(AttentionTensor::k, q + per * spec.head_size);
  out.add(AttentionTensor::v, q + (per + 1) * spec.head_size);
  out.add(AttentionTensor::y, y.data<BFloat16>() + i * calls.y_step);
  out.add(AttentionTensor::lse, lse.data<float>() + i * calls.lse_step);
  out.add(AttentionTensor::scale, &numbers.scale);
  if (spec.causal) out.add(AttentionTensor::lowest, &numbers.lowest);
  if (calls.each.alibi)
    out.add(AttentionTensor::slopes, spec.alibi_slopes_H.data<float>() + i * calls.slope_step);
  return out;
}

bool forward(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y, const Tensor& lse) {
  if (!lse.defined() || !fits(spec, {&qkv, &y})) return false;
  Library& library = library_of(qkv.device());
  const CudnnCalls calls = cudnn_calls(spec);
  const Plan* plan = library.plan_for(calls.each, false);
  if (plan == nullptr) return false;
  const Numbers numbers(spec);
  for (int64_t i = 0; i < calls.count; i++)
    library.run(*plan, arguments_of(calls, i, qkv, spec, y, lse, numbers));
  return true;
}

bool backward(const AttentionBackward& args, const AttentionSpec& spec) {
  SHOAL_CHECK(args.dy.shape() == args.y.shape() && args.dy.dtype() == args.qkv.dtype(),
              "attention_bwd: expected dy like y, ", args.y.shape(), " ", args.qkv.dtype(), ", got ",
              args.dy.shape(), ' ', args.dy.dtype());
  if (!fits(spec, {&args.qkv, &args.y, &args.dy, &args.dqkv})) return false;
  const Device device = args.qkv.device();
  Library& library = library_of(device);
  const CudnnCalls calls = cudnn_calls(spec);
  const Plan* plan = library.plan_for(calls.each, true);
  if (plan == nullptr) return false;
  const Numbers numbers(spec);
  const int64_t per = spec.heads / spec.kv_heads;
  const Tensor delta = Tensor::empty({calls.each.batch * calls.each.heads * spec.seq}, DType::f32, device);
  for (int64_t i = 0; i < calls.count; i++) {
    Arguments call = arguments_of(calls, i, args.qkv, spec, args.y, args.lse, numbers);
    BFloat16* dq = args.dqkv.data<BFloat16>() + i * calls.qkv_step;
    call.add(AttentionTensor::one, &numbers.one);
    call.add(AttentionTensor::dy, args.dy.data<BFloat16>() + i * calls.y_step);
    call.add(AttentionTensor::delta, delta.data<float>());
    call.add(AttentionTensor::dq, dq);
    call.add(AttentionTensor::dk, dq + per * spec.head_size);
    call.add(AttentionTensor::dv, dq + (per + 1) * spec.head_size);
    library.run(*plan, call);
  }
  return true;
}

[[maybe_unused]] const bool added = set_library_attention({&forward, &backward});

}  // namespace

CudnnLimits& cudnn_limits() {
  static CudnnLimits limits;
  return limits;
}

}  // namespace shoal::cuda
