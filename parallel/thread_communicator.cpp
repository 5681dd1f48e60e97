// Ranks as threads of one process, for tests. The last rank to arrive at a call carries it out for all, so
// waiting in another order than starting cannot block, and every mistake can be named: calls that differ, and
// ranks that all wait for each other.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "core/base/log.h"
#include "parallel/checked_communicator.h"
#include "parallel/reduce_parts.h"

namespace shoal {

namespace {

struct ThreadGroup;

/// One call of all ranks of a group.
struct Operation {
  const ThreadGroup* group = nullptr;
  uint64_t number = 0;
  std::vector<CollectiveCall> calls;  // per rank; emptied once done, so that no tensor is kept
  std::vector<bool> arrived;
  int num_arrived = 0;
  bool done = false;
  CollectiveSignature signature;  // of the first rank to arrive
  int first_rank = 0;
  // split only
  std::vector<std::pair<int, int>> color_key;
  std::vector<std::string> split_names;
  std::vector<std::shared_ptr<Communicator>> parts;
};

/// Shared by all groups of one run_ranks; one mutex guards everything here and in the groups.
struct ThreadWorld {
  explicit ThreadWorld(int size)
      : waiting(static_cast<size_t>(size), nullptr), finished(static_cast<size_t>(size), false) {}

  void fail(const std::string& message, ExitCode code) {  // mutex held
    if (!failure) failure.emplace(message, code);
    changed.notify_all();
  }
  void throw_if_failed() const {  // mutex held
    if (failure) throw *failure;
  }
  /// Fails when every rank has returned or waits for a call that cannot complete any more. Mutex held.
  void check_stuck();

  std::mutex mutex;
  std::condition_variable changed;
  std::optional<Error> failure;
  std::vector<const Operation*> waiting;  // per world rank
  std::vector<bool> finished;             // fn has returned
};

struct ThreadGroup {
  std::shared_ptr<ThreadWorld> world;
  std::string name;
  std::vector<int> world_ranks;
  std::map<uint64_t, std::shared_ptr<Operation>> open;  // not all ranks have arrived

  int size() const { return static_cast<int>(world_ranks.size()); }
};

void ThreadWorld::check_stuck() {
  bool any_waiting = false;
  for (size_t r = 0; r < waiting.size(); r++) {
    if (finished[r]) continue;
    if (waiting[r] == nullptr || waiting[r]->done) return;
    any_waiting = true;
  }
  if (!any_waiting || failure) return;
  std::string text = "ranks wait for each other:";
  for (size_t r = 0; r < waiting.size(); r++) {
    text += str(r == 0 ? " " : ", ", "rank ", r);
    if (finished[r]) {
      text += " has returned";
    } else {
      text += str(" is in ", waiting[r]->signature.text(), " [", waiting[r]->group->name, ", call ",
                  waiting[r]->number, "]");
    }
  }
  fail(text + "; all ranks of a group must make the same calls in the same order", ExitCode::failure);
}

std::span<const std::byte* const> part_pointers(const std::vector<CollectiveCall>& calls,
                                                int64_t offset_bytes,
                                                std::vector<const std::byte*>& pointers) {
  pointers.clear();
  for (const CollectiveCall& call : calls) pointers.push_back(call.in.bytes() + offset_bytes);
  return pointers;
}

void move_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, static_cast<size_t>(bytes));
}

void exchange_rows(const Operation& op) {
  const std::vector<CollectiveCall>& calls = op.calls;
  const int64_t row_bytes = calls[0].row_bytes();
  std::vector<int64_t> read(calls.size(), 0);  // rows already taken from each source
  for (size_t to = 0; to < calls.size(); to++) {
    std::byte* out = calls[to].out.bytes();
    for (size_t from = 0; from < calls.size(); from++) {
      const int64_t rows = calls[from].send_rows[to];
      if (rows != calls[to].recv_rows[from]) {
        throw Error(row_mismatch_message(op.group->name, op.number, static_cast<int>(from), rows,
                                         static_cast<int>(to), calls[to].recv_rows[from]));
      }
      move_bytes(out, calls[from].in.bytes() + read[from] * row_bytes, rows * row_bytes);
      read[from] += rows;
      out += rows * row_bytes;
    }
  }
}

/// Moves the data of all ranks. Every rank's buffers belong to the operation, so no lock is needed.
void move_data(const Operation& op) {
  const std::vector<CollectiveCall>& calls = op.calls;
  const CollectiveSignature& s = op.signature;
  const int64_t part_bytes = s.count * dtype_size(s.dtype);
  std::vector<const std::byte*> pointers;
  if (s.kind == CollectiveKind::all_reduce) {
    reduce_parts(s.dtype, s.op, part_pointers(calls, 0, pointers), calls[0].out.bytes(), s.count);
    for (size_t r = 1; r < calls.size(); r++)
      move_bytes(calls[r].out.bytes(), calls[0].out.bytes(), part_bytes);
  } else if (s.kind == CollectiveKind::all_gather) {
    for (const CollectiveCall& to : calls) {
      for (size_t r = 0; r < calls.size(); r++) {
        move_bytes(to.out.bytes() + static_cast<int64_t>(r) * part_bytes, calls[r].in.bytes(), part_bytes);
      }
    }
  } else if (s.kind == CollectiveKind::reduce_scatter) {
    for (size_t r = 0; r < calls.size(); r++) {
      reduce_parts(s.dtype, s.op, part_pointers(calls, static_cast<int64_t>(r) * part_bytes, pointers),
                   calls[r].out.bytes(), s.count);
    }
  } else if (s.kind == CollectiveKind::all_to_all) {
    exchange_rows(op);
  } else if (s.kind == CollectiveKind::broadcast) {
    const std::byte* from = calls[static_cast<size_t>(s.root)].in.bytes();
    for (const CollectiveCall& to : calls) move_bytes(to.out.bytes(), from, part_bytes);
  }
}

void make_parts(Operation& op);

void wait_for(ThreadWorld& world, int world_rank, const Operation& op) {
  std::unique_lock lock(world.mutex);
  if (op.done) return;
  const Operation*& waiting = world.waiting[static_cast<size_t>(world_rank)];
  waiting = &op;
  world.check_stuck();
  world.changed.wait(lock, [&] { return op.done || world.failure; });
  waiting = nullptr;
  if (!op.done) world.throw_if_failed();
}

class ThreadCommunicator final : public CheckedCommunicator {
 public:
  ThreadCommunicator(int rank, std::shared_ptr<ThreadGroup> group)
      : CheckedCommunicator(rank, group->size(), group->name), group_(std::move(group)) {}

  void barrier() override {
    if (size() > 1) start(CollectiveCall{}).wait();
  }

  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override {
    CollectiveCall call;
    call.signature.kind = CollectiveKind::split;
    const std::shared_ptr<Operation> op = arrive(std::move(call), {color, key}, name);
    wait_for(*group_->world, world_rank(), *op);
    return op->parts[static_cast<size_t>(rank())];
  }

 protected:
  Work start(CollectiveCall call) override;

 private:
  int world_rank() const { return group_->world_ranks[static_cast<size_t>(rank())]; }
  std::shared_ptr<Operation> arrive(CollectiveCall call, std::pair<int, int> color_key = {},
                                    const std::string& split_name = {});
  std::shared_ptr<Operation> register_call(CollectiveCall call, std::pair<int, int> color_key,
                                           const std::string& split_name);

  std::shared_ptr<ThreadGroup> group_;
  uint64_t num_calls_ = 0;
};

struct ThreadWork final : Work::Impl {
  ThreadWork(std::shared_ptr<ThreadGroup> group, int world_rank, std::shared_ptr<Operation> op)
      : group(std::move(group)), world_rank(world_rank), op(std::move(op)) {}
  void wait() override { wait_for(*group->world, world_rank, *op); }
  bool test() override {
    const std::lock_guard lock(group->world->mutex);
    return op->done || group->world->failure.has_value();
  }
  std::shared_ptr<ThreadGroup> group;
  int world_rank;
  std::shared_ptr<Operation> op;
};

Work ThreadCommunicator::start(CollectiveCall call) {
  return Work(std::make_unique<ThreadWork>(group_, world_rank(), arrive(std::move(call))));
}

std::shared_ptr<Operation> ThreadCommunicator::register_call(CollectiveCall call,
                                                             std::pair<int, int> color_key,
                                                             const std::string& split_name) {
  const uint64_t number = num_calls_++;
  const auto me = static_cast<size_t>(rank());
  std::shared_ptr<Operation>& slot = group_->open[number];
  if (!slot) {
    const auto n = static_cast<size_t>(size());
    slot = std::make_shared<Operation>();
    *slot = Operation{.group = group_.get(),
                      .number = number,
                      .calls = std::vector<CollectiveCall>(n),
                      .arrived = std::vector<bool>(n),
                      .signature = call.signature,
                      .first_rank = rank(),
                      .color_key = std::vector<std::pair<int, int>>(n),
                      .split_names = std::vector<std::string>(n),
                      .parts = {}};
  }
  const std::shared_ptr<Operation> op = slot;
  if (!(op->signature == call.signature)) {
    group_->world->fail(
        mismatch_message(name(), number, op->first_rank, op->signature, rank(), call.signature),
        ExitCode::failure);
    group_->world->throw_if_failed();
  }
  op->calls[me] = std::move(call);
  op->arrived[me] = true;
  op->color_key[me] = color_key;
  op->split_names[me] = split_name;
  if (++op->num_arrived == size()) group_->open.erase(number);
  return op;
}

std::shared_ptr<Operation> ThreadCommunicator::arrive(CollectiveCall call, std::pair<int, int> color_key,
                                                      const std::string& split_name) {
  ThreadWorld& world = *group_->world;
  std::unique_lock lock(world.mutex);
  world.throw_if_failed();
  std::shared_ptr<Operation> op = register_call(std::move(call), color_key, split_name);
  if (op->num_arrived < size()) return op;
  lock.unlock();
  try {
    if (op->signature.kind == CollectiveKind::split) {
      make_parts(*op);
    } else {
      move_data(*op);
    }
  } catch (const std::exception& e) {
    lock.lock();
    world.fail(e.what(), ExitCode::failure);
    throw;
  }
  op->calls.clear();
  lock.lock();
  op->done = true;
  world.changed.notify_all();
  return op;
}

void make_parts(Operation& op) {
  const int n = op.group->size();
  std::vector<int> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return op.color_key[static_cast<size_t>(a)] < op.color_key[static_cast<size_t>(b)];
  });
  op.parts.resize(static_cast<size_t>(n));
  for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    const int color = op.color_key[static_cast<size_t>(order[begin])].first;
    auto part = std::make_shared<ThreadGroup>();
    part->world = op.group->world;
    part->name = op.split_names[static_cast<size_t>(order[begin])];
    for (; end < order.size() && op.color_key[static_cast<size_t>(order[end])].first == color; end++) {
      part->world_ranks.push_back(op.group->world_ranks[static_cast<size_t>(order[end])]);
    }
    for (size_t i = begin; i < end; i++) {
      op.parts[static_cast<size_t>(order[i])] =
          std::make_shared<ThreadCommunicator>(static_cast<int>(i - begin), part);
    }
  }
}

void run_rank(int rank, const std::shared_ptr<ThreadGroup>& group,
              const std::function<void(const std::shared_ptr<Communicator>& world)>& fn) {
  ThreadWorld& world = *group->world;
  auto fail = [&](const std::string& why, ExitCode code) {
    const std::lock_guard lock(world.mutex);
    world.fail(str("rank ", rank, " failed: ", why), code);
  };
  log::set_rank(rank, group->size());
  try {
    fn(std::make_shared<ThreadCommunicator>(rank, group));
  } catch (const Error& e) {
    fail(e.what(), e.code());
  } catch (const std::exception& e) {
    fail(e.what(), ExitCode::failure);
  } catch (...) {
    fail("an exception that is not a std::exception", ExitCode::failure);
  }
  const std::lock_guard lock(world.mutex);
  world.finished[static_cast<size_t>(rank)] = true;
  world.check_stuck();
}

}  // namespace

void run_ranks(int num_ranks, const std::function<void(const std::shared_ptr<Communicator>& world)>& fn) {
  SHOAL_CHECK(num_ranks >= 1, "run_ranks: expected at least one rank, got ", num_ranks);
  auto group = std::make_shared<ThreadGroup>();
  group->world = std::make_shared<ThreadWorld>(num_ranks);
  group->name = "world";
  group->world_ranks.resize(static_cast<size_t>(num_ranks));
  std::iota(group->world_ranks.begin(), group->world_ranks.end(), 0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; rank++) {
    threads.emplace_back([rank, &group, &fn] { run_rank(rank, group, fn); });
  }
  for (std::thread& thread : threads) thread.join();
  group->world->throw_if_failed();
}

}  // namespace shoal
