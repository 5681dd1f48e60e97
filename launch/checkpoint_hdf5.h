// The HDF5 side of a checkpoint shard: libhdf5 lays the file out and writes its metadata, into memory; the
// bytes of the datasets are written by checkpoint_shard.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/checkpoint_box.h"

namespace shoal {

/// One contiguous dataset to make room for.
struct DatasetSpec {
  std::string path;            // "model/embedding"; the groups on the way are created
  std::optional<DType> dtype;  // empty: a text of text_bytes bytes
  Box box;                     // the piece: its extent is the shape of the dataset
  Shape global_shape;          // with the start of the piece stored as attributes
  int64_t text_bytes = 0;

  int64_t bytes() const { return dtype ? box.numel() * dtype_size(*dtype) : text_bytes; }
};

struct ShardLayout {
  int64_t file_bytes = 0;
  std::vector<int64_t> offsets;  // of the first byte of each dataset; 0 for datasets without bytes
  /// Everything else in the file (HDF5's own structures and padding), as offset and content, ascending.
  std::vector<std::pair<int64_t, std::string>> metadata;
};

/// The layout of an HDF5 file (format 1.10, checksummed metadata, contiguous datasets, no filters, no times)
/// with these datasets. Equal specs give equal bytes. Ranks may be threads: HDF5 calls take a process-wide
/// lock. libhdf5 never sees the checkpoint's disk: a full one would make it crash at exit.
ShardLayout make_shard_layout(const std::vector<DatasetSpec>& datasets);

}  // namespace shoal
