// What the checkpoint tests share: folders that vanish, logical tensors with known bytes, and their shards.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "core/base/log.h"
#include "core/base/random.h"
#include "launch/checkpoint.h"

namespace shoal::test {

namespace fs = std::filesystem;

/// A new folder below the system's temporary directory, removed at the end.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (fs::temp_directory_path() / "shoal-checkpoint-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw Error("cannot make " + name);
    path_ = name;
    log::set_quiet(true);
  }
  ~TempFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const fs::path& path() const { return path_; }
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

inline std::string read_all(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void write_all(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}
/// Names of everything in a folder.
inline std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  if (!fs::exists(folder)) return names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

/// One tensor of the whole model. Its bytes are random bits from (seed, name): all bit patterns, NaN
/// included.
struct Logical {
  std::string name;
  DType dtype;
  Shape shape;
  int shard_dim = -1;
};

inline std::vector<uint8_t> logical_bytes(const Logical& tensor, uint64_t seed) {
  std::vector<uint8_t> bytes(static_cast<size_t>(tensor.shape.numel() * dtype_size(tensor.dtype)));
  const uint64_t stream = stream_id(tensor.name) + seed;
  for (size_t i = 0; i < bytes.size(); i++) {
    // splitmix64 of the position: fast enough for large tensors.
    uint64_t x = stream + (i / 8) * 0x9E3779B97F4A7C15U;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    bytes[i] = static_cast<uint8_t>(x >> (8 * (i % 8)));
  }
  return bytes;
}

/// Rows [begin, end) of the sharded dimension, row by row.
inline std::vector<uint8_t> slice_bytes(const std::vector<uint8_t>& bytes, const Logical& tensor,
                                        int64_t begin, int64_t end) {
  if (tensor.shard_dim < 0) return bytes;
  int64_t outer = 1, inner = dtype_size(tensor.dtype);
  for (int d = 0; d < tensor.shard_dim; d++) outer *= tensor.shape[d];
  for (int d = tensor.shard_dim + 1; d < tensor.shape.dims(); d++) inner *= tensor.shape[d];
  std::vector<uint8_t> slice;
  for (int64_t o = 0; o < outer; o++)
    for (int64_t r = begin; r < end; r++)
      slice.insert(slice.end(), bytes.begin() + (o * tensor.shape[tensor.shard_dim] + r) * inner,
                   bytes.begin() + (o * tensor.shape[tensor.shard_dim] + r + 1) * inner);
  return slice;
}

/// This rank's shard of one tensor; `filled`: with its bytes, else with 0xEE.
inline StateTensor make_shard(const Logical& tensor, ShardRange range, bool filled, uint64_t seed) {
  StateTensor shard;
  shard.name = tensor.name;
  shard.global_shape = tensor.shape;
  shard.box = Box::whole(tensor.shape);
  if (tensor.shard_dim >= 0) {
    shard.box.start.set(tensor.shard_dim, range.begin);
    shard.box.extent.set(tensor.shard_dim, range.end - range.begin);
  }
  shard.value = Tensor::empty(shard.box.extent, tensor.dtype);
  const auto bytes = slice_bytes(logical_bytes(tensor, seed), tensor, range.begin, range.end);
  if (static_cast<int64_t>(bytes.size()) != shard.value.num_bytes()) throw Error("test: wrong slice");
  if (bytes.empty()) return shard;
  if (filled)
    std::memcpy(shard.value.bytes(), bytes.data(), bytes.size());
  else
    std::memset(shard.value.bytes(), 0xEE, bytes.size());
  return shard;
}

/// The state of one of `world` ranks: sharded tensors split evenly, the others replicated on all.
inline std::vector<StateTensor> make_state(const std::vector<Logical>& model, int rank, int world,
                                           bool filled, uint64_t seed = 1) {
  std::vector<StateTensor> state;
  for (const Logical& tensor : model) {
    ShardRange range;
    if (tensor.shard_dim >= 0) {
      const int64_t size = tensor.shape[tensor.shard_dim];
      range = {size * rank / world, size * (rank + 1) / world};
    }
    state.push_back(make_shard(tensor, range, filled, seed));
    if (tensor.shard_dim < 0) {
      state.back().replica_index = rank;
      state.back().replica_count = world;
    }
  }
  return state;
}

/// Every shard holds exactly the bytes it should.
inline void expect_state(const std::vector<Logical>& model, const std::vector<StateTensor>& state,
                         uint64_t seed = 1) {
  ASSERT_EQ(state.size(), model.size());
  for (size_t i = 0; i < model.size(); i++) {
    const StateTensor& shard = state[i];
    const int dim = std::max(model[i].shard_dim, 0);
    const int64_t begin = model[i].shard_dim < 0 ? 0 : shard.box.start[dim],
                  end = model[i].shard_dim < 0 ? 0 : begin + shard.box.extent[dim];
    const auto expected = slice_bytes(logical_bytes(model[i], seed), model[i], begin, end);
    ASSERT_EQ(static_cast<int64_t>(expected.size()), shard.value.num_bytes());
    EXPECT_TRUE(expected.empty() || std::memcmp(expected.data(), shard.value.bytes(), expected.size()) == 0)
        << shard.name << " [" << begin << ", " << end << ")";
  }
}

/// All dtypes, odd shapes, a scalar, tensors without elements, shards of outer and inner dimensions.
inline std::vector<Logical> mixed_model() {
  return {{"model/embedding", DType::f32, {37, 5}},
          {"model/layers.0.experts.up", DType::bf16, {7, 3, 5}, 0},
          {"model/layers.0.qkv.weight", DType::f64, {3, 11, 2}, 1},
          {"model/norm", DType::f32, {1}},
          {"optim/m/layers.0.experts.up", DType::f32, {7, 3, 5}, 0},
          {"optim/step", DType::i64, {}},
          {"router/layer.1/bias", DType::f32, {4, 9}, 1},
          {"router/layer.1/counts", DType::i32, {13}},
          {"data/flags", DType::u8, {2, 3, 2, 5}, 3},
          {"data/empty", DType::f32, {0, 4}},
          {"data/empty_sharded", DType::i64, {3, 0}, 0}};
}

}  // namespace shoal::test
