// Where a transformer's weights are used: its units (core/nn/weight_unit.h).
#include <algorithm>

#include "models/transformer.h"

namespace shoal {

void Transformer::make_weight_units() {
  const int num_ranks = stage_ranks_.size(), last = static_cast<int>(stages_.size()) - 1;
  const auto place = [&](WeightUnit& unit, const std::string& name, int stage) {
    unit.name = name;
    unit.stage = stage;
    unit.held = stage % num_ranks == stage_ranks_.rank();
  };
  place(embedding_unit_, "embedding", 0);
  embedding_unit_.forward_only = true;
  embedding_unit_.parameters = position_->parameters();
  embedding_unit_.parameters.push_back(embedding_);
  for (int64_t l = 0, stage = 0; l < options_.layers; l++) {
    while (l >= stages_[static_cast<size_t>(stage)].end) stage++;
    Block& block = *blocks_[static_cast<size_t>(l)];
    WeightUnit& unit = block.unit();
    place(unit, str("layers.", l), static_cast<int>(stage));
    unit.parameters = block.parameters();
    if (block.moe() == nullptr) continue;
    WeightUnit& experts = block.moe()->experts_unit();
    place(experts, unit.name + ".moe.experts", static_cast<int>(stage));
    experts.outer = &unit;
    std::erase_if(unit.parameters, [&](Parameter* p) {
      return std::ranges::find(experts.parameters, p) != experts.parameters.end();
    });
  }
  place(final_norm_unit_, "final_norm", last);
  if (final_norm_) final_norm_unit_.parameters = final_norm_->parameters();
  place(head_unit_, "head", last);
  head_unit_.forward_only = true;  // the loss makes its gradients in forward
  head_unit_.parameters = {head_ != nullptr ? head_ : embedding_};
}

std::vector<WeightUnit*> Transformer::weight_units() {
  std::vector<WeightUnit*> units = {&embedding_unit_};
  for (const std::unique_ptr<Block>& block : blocks_) {
    units.push_back(&block->unit());
    if (block->moe() != nullptr) units.push_back(&block->moe()->experts_unit());
  }
  units.insert(units.end(), {&final_norm_unit_, &head_unit_});
  return units;
}

}  // namespace shoal
