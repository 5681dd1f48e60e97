#include "parallel/weight_gather.h"

#include <algorithm>
#include <ranges>

#include "core/base/profiler.h"

namespace shoal {

namespace {
constexpr const char* kSection = "parameter gather";
}

WeightGather::WeightGather(const std::vector<WeightUnit*>& units, std::vector<FlatBucket*> buckets) {
  for (FlatBucket* bucket : buckets)
    if (bucket->is_cut()) entries_.push_back({bucket});
  if (entries_.empty()) return;
  const auto uses = [](const WeightUnit& unit, const FlatBucket& bucket) {
    return std::ranges::any_of(bucket.parameters(), [&](const Parameter* p) {
      return std::ranges::find(unit.parameters, p) != unit.parameters.end();
    });
  };
  for (WeightUnit* unit : units) {
    if (!unit->held) continue;
    Unit& own = units_.emplace_back(Unit{unit, {}});
    for (size_t i = 0; i < entries_.size(); i++)
      if (uses(*unit, *entries_[i].bucket)) own.entries.push_back(i);
  }
  find_next();
  for (size_t i = 0; i < units_.size(); i++) {
    if (units_[i].entries.empty()) continue;
    units_[i].unit->on_begin = [this, i](Direction direction) { begin(i, direction); };
    units_[i].unit->on_end = [this, i] { end(i); };
  }
}

WeightGather::~WeightGather() {
  for (const Unit& each : units_) each.unit->on_begin = nullptr, each.unit->on_end = nullptr;
}

void WeightGather::find_next() {
  const auto divides = [&](int unit) {
    return std::ranges::any_of(units_[static_cast<size_t>(unit)].entries,
                               [&](size_t e) { return entries_[e].bucket->divides_values(); });
  };
  const auto link = [&](const std::vector<int>& order, Direction direction) {
    for (size_t i = 0; i < order.size(); i++) {
      Unit& own = units_[static_cast<size_t>(order[i])];
      const auto next = std::find_if(order.begin() + static_cast<ptrdiff_t>(i) + 1, order.end(), divides);
      if (next != order.end() && units_[static_cast<size_t>(*next)].unit->stage == own.unit->stage)
        own.next[static_cast<size_t>(direction)] = *next;
    }
  };
  std::vector<int> forward, backward;
  for (int i = 0; i < std::ssize(units_); i++) forward.push_back(i);
  // Backward meets a unit before those that it spans.
  for (int i = static_cast<int>(std::ssize(units_)) - 1; i >= 0; i--) {
    const WeightUnit* unit = units_[static_cast<size_t>(i)].unit;
    if (unit->forward_only) continue;
    auto at = backward.end();
    while (at != backward.begin() && units_[static_cast<size_t>(*std::prev(at))].unit->outer == unit) at--;
    backward.insert(at, i);
  }
  link(forward, Direction::forward);
  link(backward, Direction::backward);
}

void WeightGather::start(Entry& entry) {
  if (entry.is_gathered) return;
  entry.bucket->start_gather();
  entry.is_gathered = entry.is_under_way = true;
}

void WeightGather::complete(Entry& entry) {
  if (!entry.is_under_way) return;
  entry.bucket->complete_gather();
  entry.is_under_way = false;
}

void WeightGather::begin(size_t unit, Direction direction) {
  const ProfileSection section(kSection, ProfileSection::kWhole);
  const Unit& own = units_[unit];
  const auto start_all = [&](const Unit& of) {
    for (const size_t e : of.entries)
      if (entries_[e].bucket->divides_values()) start(entries_[e]);
  };
  start_all(own);
  if (const int next = own.next[static_cast<size_t>(direction)]; next >= 0)
    start_all(units_[static_cast<size_t>(next)]);
  // Those under way move on between the layers.
  for (Entry& entry : entries_)
    if (entry.is_under_way) entry.bucket->test_gather();
  for (const size_t e : own.entries) {
    complete(entries_[e]);
    entries_[e].uses++;
  }
}

void WeightGather::end(size_t unit) {
  for (const size_t e : units_[unit].entries) {
    Entry& entry = entries_[e];
    if (--entry.uses > 0 || !entry.bucket->divides_values()) continue;
    entry.bucket->drop_values();
    entry.is_gathered = false;
  }
}

void WeightGather::settle() {
  const ProfileSection section(kSection, ProfileSection::kWhole);
  for (Entry& entry : entries_) {
    SHOAL_CHECK(entry.uses == 0, "WeightGather: ", entry.bucket->parameters()[0]->name,
                " is read or written from outside while the model uses it");
    complete(entry);
    if (entry.is_gathered && entry.bucket->divides_values()) entry.bucket->drop_values();
    entry.is_gathered = false;
  }
}

void WeightGather::start_updated() {
  const ProfileSection section(kSection, ProfileSection::kWhole);
  for (Entry& entry : entries_ | std::views::reverse)
    if (!entry.bucket->divides_values()) start(entry);
}

}  // namespace shoal
