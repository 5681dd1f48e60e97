#include "launch/checkpoint_hdf5.h"

#include <hdf5.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "launch/hdf5_sparse_file.h"

namespace shoal {

namespace {

// The library is not thread-safe and its error stack is global.
std::mutex hdf5_mutex;

herr_t first_description(unsigned, const H5E_error2_t* error, void* text) {
  auto* description = static_cast<std::string*>(text);
  if (description->empty() && error->desc != nullptr) *description = error->desc;
  return 0;
}

[[noreturn]] void hdf5_failed(const std::string& what) {
  std::string description;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, first_description, &description);
  throw Error(str("HDF5: ", what, " failed: ", description.empty() ? "no description" : description));
}

void check(herr_t status, const std::string& what) {
  if (status < 0) hdf5_failed(what);
}

// An HDF5 identifier, closed in the destructor.
class Handle {
 public:
  Handle(hid_t id, herr_t (*close)(hid_t), const std::string& what) : id_(id), close_(close) {
    if (id < 0) hdf5_failed(what);
  }
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    if (id_ >= 0) close_(id_);
  }
  operator hid_t() const { return id_; }
  void close(const std::string& what) { check(close_(std::exchange(id_, -1)), what); }

 private:
  hid_t id_;
  herr_t (*close_)(hid_t);
};

Handle properties(hid_t kind) {
  return Handle(H5Pcreate(kind), H5Pclose, "H5Pcreate");
}

hid_t file_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return H5T_IEEE_F32LE;
    case DType::f64:
      return H5T_IEEE_F64LE;
    case DType::bf16:
      return H5T_STD_U16LE;  // HDF5 1.10 has no bfloat16; the attribute "dtype" says what the bits are
    case DType::i32:
      return H5T_STD_I32LE;
    case DType::i64:
      return H5T_STD_I64LE;
    case DType::u8:
      return H5T_STD_U8LE;
  }
  throw Error("HDF5: no type for this dtype");
}

Handle text_type(int64_t bytes) {
  // Strings of 0 bytes do not exist in HDF5.
  Handle type(H5Tcopy(H5T_C_S1), H5Tclose, "H5Tcopy");
  check(H5Tset_size(type, static_cast<size_t>(std::max<int64_t>(bytes, 1))), "H5Tset_size");
  check(H5Tset_strpad(type, H5T_STR_NULLPAD), "H5Tset_strpad");
  check(H5Tset_cset(type, H5T_CSET_UTF8), "H5Tset_cset");
  return type;
}

Handle dataspace(const Shape& shape) {
  if (shape.dims() == 0) return Handle(H5Screate(H5S_SCALAR), H5Sclose, "H5Screate");
  std::vector<hsize_t> sizes(shape.sizes().begin(), shape.sizes().end());
  return Handle(H5Screate_simple(shape.dims(), sizes.data(), nullptr), H5Sclose, "H5Screate_simple");
}

void write_text_attribute(hid_t object, const char* name, const std::string& value) {
  const Handle type = text_type(static_cast<int64_t>(value.size())), space = dataspace({});
  const Handle attribute(H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose, name);
  check(H5Awrite(attribute, type, value.data()), name);
}

void write_sizes_attribute(hid_t object, const char* name, const Shape& value) {
  if (value.dims() == 0) return;
  const Handle space = dataspace({value.dims()});
  const Handle attribute(H5Acreate2(object, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
                         name);
  check(H5Awrite(attribute, H5T_NATIVE_INT64, value.sizes().data()), name);
}

// Creates the groups of a path; explicitly, because groups that HDF5 creates on its own carry times.
void create_groups(hid_t file, const std::string& path, hid_t creation, std::set<std::string>& existing) {
  for (size_t slash = path.find('/'); slash != std::string::npos; slash = path.find('/', slash + 1)) {
    const std::string group = path.substr(0, slash);
    if (!existing.insert(group).second) continue;
    Handle(H5Gcreate2(file, group.c_str(), H5P_DEFAULT, creation, H5P_DEFAULT), H5Gclose,
           "creating group " + group);
  }
}

int64_t create_dataset(hid_t file, const DatasetSpec& spec, hid_t creation) {
  const Handle space = dataspace(spec.dtype ? spec.box.extent : Shape{});
  const Handle text = text_type(spec.text_bytes);
  const Handle dataset(H5Dcreate2(file, spec.path.c_str(), spec.dtype ? file_type(*spec.dtype) : hid_t{text},
                                  space, H5P_DEFAULT, creation, H5P_DEFAULT),
                       H5Dclose, "creating dataset " + spec.path);
  if (spec.dtype) {
    write_text_attribute(dataset, "dtype", dtype_name(*spec.dtype));
    write_sizes_attribute(dataset, "global_shape", spec.global_shape);
    write_sizes_attribute(dataset, "start", spec.box.start);
  }
  if (spec.bytes() == 0) return 0;
  const haddr_t offset = H5Dget_offset(dataset);
  if (offset == HADDR_UNDEF) hdf5_failed("placing dataset " + spec.path);
  return static_cast<int64_t>(offset);
}

std::vector<int64_t> create_file(SparseBytes& bytes, const std::vector<DatasetSpec>& datasets) {
  const std::lock_guard lock(hdf5_mutex);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // failures are reported by exceptions, not on stderr
  const Handle access = properties(H5P_FILE_ACCESS), file_creation = properties(H5P_FILE_CREATE);
  check(use_sparse_file(access, bytes), "H5Pset_driver");
  check(H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110), "H5Pset_libver_bounds");
  check(H5Pset_alignment(access, 4096, 4096), "H5Pset_alignment");
  check(H5Pset_obj_track_times(file_creation, false), "H5Pset_obj_track_times");
  Handle file(H5Fcreate("checkpoint-shard", H5F_ACC_TRUNC, file_creation, access), H5Fclose,
              "creating the file");
  const Handle group_creation = properties(H5P_GROUP_CREATE), creation = properties(H5P_DATASET_CREATE);
  check(H5Pset_obj_track_times(group_creation, false), "H5Pset_obj_track_times");
  check(H5Pset_obj_track_times(creation, false), "H5Pset_obj_track_times");
  check(H5Pset_layout(creation, H5D_CONTIGUOUS), "H5Pset_layout");
  check(H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY), "H5Pset_alloc_time");
  check(H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER), "H5Pset_fill_time");
  std::set<std::string> groups;
  std::vector<int64_t> offsets;
  for (const DatasetSpec& spec : datasets) {
    create_groups(file, spec.path, group_creation, groups);
    offsets.push_back(create_dataset(file, spec, creation));
  }
  file.close("closing the file");
  return offsets;
}

}  // namespace

ShardLayout make_shard_layout(const std::vector<DatasetSpec>& datasets) {
  SparseBytes file;
  ShardLayout layout;
  layout.offsets = create_file(file, datasets);
  layout.file_bytes = file.size();
  std::vector<std::pair<int64_t, int64_t>> taken;
  for (size_t i = 0; i < datasets.size(); i++)
    if (datasets[i].bytes() > 0)
      taken.emplace_back(layout.offsets[i], layout.offsets[i] + datasets[i].bytes());
  std::sort(taken.begin(), taken.end());
  taken.emplace_back(layout.file_bytes, layout.file_bytes);
  int64_t end = 0;
  for (const auto& [begin, next_end] : taken) {
    SHOAL_CHECK(begin >= end && next_end <= layout.file_bytes, "HDF5: dataset at [", begin, ", ", next_end,
                ") overlaps other data or the end of the file (", layout.file_bytes, " bytes)");
    if (begin > end) {
      std::string bytes(static_cast<size_t>(begin - end), '\0');
      file.read(end, bytes.data(), begin - end);
      layout.metadata.emplace_back(end, std::move(bytes));
    }
    end = next_end;
  }
  return layout;
}

}  // namespace shoal
