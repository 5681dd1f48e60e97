// The exchange of dispatch and combine in parts: rows of one part travel while experts work on another one.
// All records of a layer share one PartedExchange, in forward and then in backward. Knows no experts.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/tensor/tensor.h"
#include "parallel/communicator.h"

namespace shoal {

/// What one part sends and gets from each rank. The parts follow each other in the rows sent.
struct PartRows {
  std::vector<int64_t> send_rows, recv_rows;
};

/// Collective over the group, in the order of calls.
class PartedExchange {
 public:
  PartedExchange(Communicator& group, std::vector<PartRows> parts);
  int64_t num_parts() const { return std::ssize(parts_); }

  /// Starts all parts of x [N, D] on their way to the ranks of their rows; with last_first the last part
  /// first.
  void spread(const Tensor& x_ND, bool last_first);
  /// The rows of a part that was spread; waits for them.
  Tensor arrive(int64_t part);
  /// Starts y, in the order of arrival, on its way back.
  void send_back(int64_t part, const Tensor& y_RD);
  /// All rows that were sent back, in the order of x; waits for them.
  Tensor collect();

 private:
  struct Part {
    PartRows rows;
    int64_t first = 0, num_sent = 0, num_received = 0;  // first: in the rows of all parts
    Tensor received;
    Work coming, going;
  };
  Communicator* group_;
  std::vector<Part> parts_;
  int64_t num_rows_ = 0;
  Tensor collected_;
};

/// The same with gradients: each is the transpose of another one. A handle is not to be read; it carries the
/// gradient. `spread_rows` returns one for each part; `send_rows_back` takes the handle that it returned for
/// the part before (undefined: none), and the last one goes to `collect_rows`.
using SharedExchange = std::shared_ptr<PartedExchange>;
std::vector<Tensor> spread_rows(const SharedExchange& exchange, const Tensor& x_ND);
Tensor arrived_rows(const SharedExchange& exchange, int64_t part, const Tensor& handle);
Tensor send_rows_back(const SharedExchange& exchange, int64_t part, const Tensor& y_RD, const Tensor& before);
Tensor collect_rows(const SharedExchange& exchange, const Tensor& handle);

}  // namespace shoal
