// Saved: what a Function keeps of a tensor for its backward. A tensor that can be made again (with_recipe) is
// not kept itself: the first Function that asks for it in backward has it made, the others of that time share
// it, and it is gone with the last of them. Recipes may build on each other. Used by Functions; models say
// what has a recipe.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "core/tensor/tensor.h"

namespace shoal {

/// How a tensor is made from another one. Both are detached: a recipe leaves no gradients and no counts.
using RecipeBody = std::function<Tensor(const Tensor& x)>;

class Saved {
 public:
  Saved() = default;
  Saved(const Tensor& t)  // NOLINT: a Function assigns a tensor to what it keeps
      : kept_(t.recipe ? Tensor{} : t.detach()), recipe_(t.recipe), shape_(t.shape()) {}

  bool defined() const { return kept_.defined() || recipe_ != nullptr; }
  explicit operator bool() const { return defined(); }
  const Shape& shape() const { return shape_; }

  /// The tensor, made again if need be.
  Tensor get() const;
  /// The same for the last time: the caller is its sole owner unless something else holds it.
  Tensor take();

 private:
  Tensor kept_;
  std::shared_ptr<Recipe> recipe_;
  Shape shape_;
};

/// A tensor that is not kept, but made again when it is needed.
class Recipe {
 public:
  Recipe(Saved x, RecipeBody body) : x_(std::move(x)), body_(std::move(body)) {}
  const Tensor& get();

 private:
  Saved x_;
  RecipeBody body_;
  Tensor made_;
};

/// y, which must equal body(x) bit for bit, with a recipe: Functions that save y keep x (or x's own recipe)
/// instead. Without an active tape, or when no gradient will flow back from y, y as it is.
Tensor with_recipe(Tensor y, const Tensor& x, RecipeBody body);

/// body(x) with a recipe when `again`, else plainly.
template <class Body>
Tensor apply_again(bool again, const Tensor& x, const Body& body) {
  Tensor y = body(x);
  return again ? with_recipe(std::move(y), x, body) : y;
}

}  // namespace shoal
