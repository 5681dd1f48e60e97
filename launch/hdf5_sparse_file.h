// A file driver for libhdf5 that keeps the file in memory, in pages: ranges that are never written take none.
// The checkpoint writer lets libhdf5 lay out a shard with it, so that the library never meets a full disk.
#pragma once

#include <hdf5.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>

namespace shoal {

/// The bytes of one file. What was not written reads as zero.
class SparseBytes {
 public:
  void write(int64_t offset, const void* data, int64_t bytes);
  void read(int64_t offset, void* data, int64_t bytes) const;
  int64_t size() const { return size_; }
  void set_size(int64_t size) { size_ = size; }

 private:
  static constexpr int64_t kPageBytes = 4096;
  std::map<int64_t, std::array<char, kPageBytes>> pages_;  // by offset / kPageBytes
  int64_t size_ = 0;
};

/// Makes a file access property list (H5P_FILE_ACCESS) open files in `bytes`, which must outlive them.
/// Returns a negative number on failure, like the calls of libhdf5.
herr_t use_sparse_file(hid_t access, SparseBytes& bytes);

}  // namespace shoal
