// Communicator: moves bytes within one group of ranks. Knows nothing of gradients, meshes or experts.
// Every call is collective: all ranks of the group call it in the same order. Calls return at once; the
// buffers belong to the operation until its Work has been waited for. Sums run in rank order 0, 1, ..., so a
// result has the same bits on every rank, in every run and over every implementation. Tensors of a device:
// the call takes its place in the caller's current stream, and so does its end when it is waited for.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/autograd/pending.h"
#include "core/tensor/tensor.h"
#include "parallel/traffic.h"

namespace shoal {

enum class ReduceOp : uint8_t { sum, max, min };

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// For messages: "world", "ep", "dp", ...
  virtual const std::string& name() const = 0;
  /// Whether calls take tensors of this device: the cpu's always.
  virtual bool carries(Device device) const { return device.type == DeviceType::cpu; }
  /// Whether calls on tensors of this device only take their places in its streams: the host waits neither at
  /// their start nor at their end. The same on all ranks.
  virtual bool queues(Device /*device*/) const { return false; }

  /// In place; f32, f64, bf16 (summed in f32), i32, i64, u8. An empty tensor is legal.
  virtual Work all_reduce(const Tensor& inout, ReduceOp op) = 0;
  /// out has size() * in.numel() elements, rank order. `in` may be the own part of `out`.
  virtual Work all_gather(const Tensor& in, const Tensor& out) = 0;
  /// in has size() * out.numel() elements; out is this rank's part of the reduction, and may be that part of
  /// `in`.
  virtual Work reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp op) = 0;
  /// Rows (dimension 0) of `in`, grouped by destination, go to the rows of `out`, grouped by source.
  /// send_rows and recv_rows have size() entries >= 0 that sum to the rows of in and out, and recv_rows[i]
  /// here == send_rows[rank()] on rank i.
  virtual Work all_to_all(const Tensor& in, const Tensor& out, std::span<const int64_t> send_rows,
                          std::span<const int64_t> recv_rows) = 0;
  virtual Work broadcast(const Tensor& inout, int root) = 0;
  virtual void barrier() = 0;
  /// Zeros, of the same shape on all ranks, that collectives may reach without copies: an all_reduce of them
  /// or of any part, the same one on all ranks, is done in place, and so are a reduce_scatter of them and an
  /// all_gather of the own part of them. On `device`, of the same type on all ranks.
  /// Collective; blocks.
  virtual Tensor shared_zeros(const Shape& shape, DType dtype, Device device) {
    return Tensor::zeros(shape, dtype, device);
  }
  /// Ranks with equal color form a new group, ordered by key (then by rank here). Every rank must call it;
  /// blocks.
  virtual std::shared_ptr<Communicator> split(int color, int key, const std::string& name) = 0;
  struct Place {
    int color = 0, key = 0;
  };
  /// The same where everyone can tell the place of each rank: the new group knows the nodes of its ranks, and
  /// its traffic is counted with this one's.
  virtual std::shared_ptr<Communicator> split_by(const std::function<Place(int rank)>& place_of,
                                                 const std::string& name);
  /// What this rank sends in this group, and in those that were split off by place.
  virtual TrafficCounter& traffic() = 0;

  // Blocking conveniences on host values.
  int64_t sum(int64_t value);
  double sum(double value);
  int64_t max(int64_t value);
  int64_t min(int64_t value);
  bool all_true(bool value) { return min(value ? 1 : 0) == 1; }
  bool any_true(bool value) { return max(value ? 1 : 0) == 1; }
  /// Every rank's bytes, in rank order (sizes may differ).
  std::vector<std::string> gather_strings(const std::string& mine);
  /// Root's bytes on every rank.
  std::string broadcast_string(const std::string& value, int root);
};

/// A group of one rank: every collective is a local copy.
std::shared_ptr<Communicator> make_single_communicator();

/// A rank of a group that does not exist, to look at its groups and to count what it would send. split_by()
/// works; calls, and split(), throw Error.
std::shared_ptr<Communicator> make_imagined_communicator(int rank, int size, const std::string& name);

/// Runs fn on `num_ranks` ranks that are threads of this process, each with its own rank of a common world.
/// Blocks. When a rank throws, the others are woken out of their collectives, and one Error "rank 2 failed:
/// ..." is thrown here.
void run_ranks(int num_ranks, const std::function<void(const std::shared_ptr<Communicator>& world)>& fn);

}  // namespace shoal
