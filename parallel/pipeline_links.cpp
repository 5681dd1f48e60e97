#include "parallel/pipeline_links.h"

#include "core/base/error.h"

namespace shoal {

PipelineLinks::PipelineLinks(Communicator& ranks, bool ring) {
  const int p = ranks.size(), me = ranks.rank();
  if (p == 1) return;
  // Pair e is of ranks e and e + 1. A split makes pairs that share no rank: the even ones, the odd ones, and,
  // when there is an odd number, the pair that closes the ring.
  const int num_pairs = ring && p > 2 ? p : p - 1;
  const auto turn_of = [&](int pair) { return pair == p - 1 && p % 2 == 1 ? 2 : pair % 2; };
  for (int turn = 0; turn < 3; turn++) {
    const auto pair_of = [&](int rank) {
      for (int pair = 0; pair < num_pairs; pair++)
        if (turn_of(pair) == turn && (rank == pair || rank == (pair + 1) % p)) return pair;
      return -1;
    };
    bool any = false;
    for (int pair = 0; pair < num_pairs; pair++) any |= turn_of(pair) == turn;
    if (!any) continue;
    const int mine = pair_of(me);
    for (const bool ahead : {true, false}) {
      const auto sends_first = [&](int rank) { return (rank == pair_of(rank)) == ahead; };
      const auto place = [&](int rank) {
        const int pair = pair_of(rank);
        return Communicator::Place{pair >= 0 ? pair : p + rank, sends_first(rank) ? 0 : 1};
      };
      const bool sends = sends_first(me);
      std::shared_ptr<Communicator> group = ranks.split_by(place, ranks.name());
      if (mine < 0) continue;
      const int other = me == mine ? (mine + 1) % p : mine;
      (sends ? to_ : from_)[other] = std::move(group);
    }
  }
}

Work PipelineLinks::send(const Tensor& message, int to) const {
  const auto link = to_.find(to);
  SHOAL_CHECK(link != to_.end(), "pipeline: rank ", to, " is no neighbour of this one");
  return link->second->broadcast(message, 0);
}

Work PipelineLinks::receive(const Tensor& message, int from) const {
  const auto link = from_.find(from);
  SHOAL_CHECK(link != from_.end(), "pipeline: rank ", from, " is no neighbour of this one");
  return link->second->broadcast(message, 0);
}

}  // namespace shoal
