#include "launch/hdf5_sparse_file.h"

#if __has_include(<H5FDdevelop.h>)
#include <H5FDdevelop.h>
#endif

#include <algorithm>
#include <cstring>
#include <new>

namespace shoal {

namespace {

struct SparseFile {
  H5FD_t base;  // first: libhdf5 writes its own fields into it
  SparseBytes* bytes;
  haddr_t end_of_addresses;
};

SparseFile& as_sparse(H5FD_t* file) {
  return *reinterpret_cast<SparseFile*>(file);
}
const SparseFile& as_sparse(const H5FD_t* file) {
  return *reinterpret_cast<const SparseFile*>(file);
}

// libhdf5 is C: no exception may pass through it.
template <class Work>
herr_t no_exceptions(Work&& work) {
  try {
    work();
    return 0;
  } catch (...) {
    return -1;
  }
}

H5FD_t* open_file(const char*, unsigned, hid_t access, haddr_t) {
  const auto* info = static_cast<SparseBytes* const*>(H5Pget_driver_info(access));
  if (info == nullptr) return nullptr;
  auto* file = new (std::nothrow) SparseFile{};
  if (file == nullptr) return nullptr;
  file->bytes = *info;
  return &file->base;
}

herr_t close_file(H5FD_t* file) {
  delete &as_sparse(file);
  return 0;
}

herr_t query(const H5FD_t*, unsigned long* flags) {
  *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
           H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
  return 0;
}

haddr_t end_of_addresses(const H5FD_t* file, H5FD_mem_t) {
  return as_sparse(file).end_of_addresses;
}
herr_t set_end_of_addresses(H5FD_t* file, H5FD_mem_t, haddr_t address) {
  as_sparse(file).end_of_addresses = address;
  return 0;
}
haddr_t end_of_file(const H5FD_t* file, H5FD_mem_t) {
  return static_cast<haddr_t>(as_sparse(file).bytes->size());
}

herr_t read_bytes(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t address, size_t size, void* buffer) {
  return no_exceptions([&] {
    as_sparse(file).bytes->read(static_cast<int64_t>(address), buffer, static_cast<int64_t>(size));
  });
}
herr_t write_bytes(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t address, size_t size, const void* buffer) {
  return no_exceptions([&] {
    as_sparse(file).bytes->write(static_cast<int64_t>(address), buffer, static_cast<int64_t>(size));
  });
}

herr_t truncate_file(H5FD_t* file, hid_t, hbool_t) {
  as_sparse(file).bytes->set_size(static_cast<int64_t>(as_sparse(file).end_of_addresses));
  return 0;
}

hid_t register_driver() {
  static H5FD_class_t driver{};
#ifdef H5FD_CLASS_VERSION
  driver.version = H5FD_CLASS_VERSION;
  driver.value = static_cast<H5FD_class_value_t>(500);  // a number of the range for private drivers
#endif
  driver.name = "sparse memory";
  driver.maxaddr = static_cast<haddr_t>(INT64_MAX);
  driver.fc_degree = H5F_CLOSE_WEAK;
  driver.fapl_size = sizeof(SparseBytes*);
  driver.open = open_file;
  driver.close = close_file;
  driver.query = query;
  driver.get_eoa = end_of_addresses;
  driver.set_eoa = set_end_of_addresses;
  driver.get_eof = end_of_file;
  driver.read = read_bytes;
  driver.write = write_bytes;
  driver.truncate = truncate_file;
  const H5FD_mem_t kinds[] = H5FD_FLMAP_DICHOTOMY;  // metadata and raw data apart, as in ordinary files
  std::copy(std::begin(kinds), std::end(kinds), std::begin(driver.fl_map));
  return H5FDregister(&driver);
}

}  // namespace

void SparseBytes::write(int64_t offset, const void* data, int64_t bytes) {
  size_ = std::max(size_, offset + bytes);
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const int64_t within = offset % kPageBytes, count = std::min(bytes, kPageBytes - within);
    std::memcpy(pages_[offset / kPageBytes].data() + within, from, static_cast<size_t>(count));
    from += count;
    offset += count;
    bytes -= count;
  }
}

void SparseBytes::read(int64_t offset, void* data, int64_t bytes) const {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const int64_t within = offset % kPageBytes, count = std::min(bytes, kPageBytes - within);
    const auto page = pages_.find(offset / kPageBytes);
    if (page == pages_.end())
      std::memset(to, 0, static_cast<size_t>(count));
    else
      std::memcpy(to, page->second.data() + within, static_cast<size_t>(count));
    to += count;
    offset += count;
    bytes -= count;
  }
}

herr_t use_sparse_file(hid_t access, SparseBytes& bytes) {
  static const hid_t driver = register_driver();
  if (driver < 0) return -1;
  SparseBytes* info = &bytes;  // libhdf5 copies the pointer
  return H5Pset_driver(access, driver, &info);
}

}  // namespace shoal
