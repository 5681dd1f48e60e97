#include "core/autograd/saved.h"

#include "core/autograd/tape.h"

namespace shoal {

Tensor Saved::get() const {
  return recipe_ ? recipe_->get().view(shape_) : kept_;
}

Tensor Saved::take() {
  Tensor t = get();
  recipe_.reset();
  kept_ = {};
  return t;
}

const Tensor& Recipe::get() {
  if (!made_.defined()) {
    const Tape tape(Tape::Mode::off, /*replay=*/true);
    made_ = body_(x_.take()).detach();
    made_.recipe = nullptr;
    body_ = nullptr;
  }
  return made_;
}

Tensor with_recipe(Tensor y, const Tensor& x, RecipeBody body) {
  if (y.requires_grad()) y.recipe = std::make_shared<Recipe>(Saved(x), std::move(body));
  return y;
}

}  // namespace shoal
