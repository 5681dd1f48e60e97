#include "launch/checkpoint_format.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "launch/crc32c.h"

namespace shoal {

namespace {

using nlohmann::json;

std::string hex(uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

std::optional<uint32_t> parse_hex(std::string_view text) {
  if (text.size() != 8) return std::nullopt;
  uint32_t value = 0;
  for (const char c : text) {
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return std::nullopt;
    value = value << 4 | static_cast<uint32_t>(c <= '9' ? c - '0' : c - 'a' + 10);
  }
  return value;
}

json sizes_json(const Shape& shape) {
  return std::vector<int64_t>(shape.sizes().begin(), shape.sizes().end());
}

json file_json(const FileRecord& file) {
  json blocks = json::array();
  for (const uint32_t crc : file.block_crcs) blocks.push_back(hex(crc));
  return {
      {"name", file.name}, {"bytes", file.bytes}, {"crc32c", hex(file.crc)}, {"blocks", std::move(blocks)}};
}

json tensor_json(const TensorRecord& tensor) {
  json pieces = json::array();
  for (const PieceRecord& piece : tensor.pieces)
    pieces.push_back({{"file", piece.file},
                      {"offset", piece.offset},
                      {"bytes", piece.bytes},
                      {"start", sizes_json(piece.box.start)},
                      {"extent", sizes_json(piece.box.extent)},
                      {"crc32c", hex(piece.crc)}});
  return {{"name", tensor.name},
          {"dtype", dtype_name(tensor.dtype)},
          {"shape", sizes_json(tensor.shape)},
          {"pieces", std::move(pieces)}};
}

// The readers below throw Error or json::exception; parse_manifest turns both into a problem.
int64_t get_size(const json& object, const char* key) {
  const json& value = object.at(key);
  if (!value.is_number_integer()) throw Error(str(key, ": expected an integer, got ", value.dump()));
  const auto size = value.get<int64_t>();
  if (size < 0) throw Error(str(key, ": expected an integer >= 0, got ", value.dump()));
  return size;
}

const json& get_list(const json& object, const char* key) {
  const json& list = object.at(key);
  if (!list.is_array()) throw Error(str(key, ": expected a list, got ", list.type_name()));
  return list;
}

uint32_t get_crc(const json& value) {
  const auto crc = parse_hex(value.get_ref<const std::string&>());
  if (!crc) throw Error("crc32c: expected 8 hexadecimal digits, got '" + value.get<std::string>() + "'");
  return *crc;
}

Shape get_shape(const json& object, const char* key) {
  const json& list = get_list(object, key);
  if (list.size() > static_cast<size_t>(Shape::kMaxDims))
    throw Error(str(key, ": expected a list of at most ", Shape::kMaxDims, " sizes"));
  std::vector<int64_t> sizes;
  int64_t product = 1;
  for (const json& item : list) {
    if (!item.is_number_integer() || item.get<int64_t>() < 0)
      throw Error(str(key, ": expected sizes >= 0, got ", item.dump()));
    sizes.push_back(item.get<int64_t>());
    // A size of 0 must not hide that the others overflow, so it counts as 1 here.
    if (__builtin_mul_overflow(product, std::max<int64_t>(sizes.back(), 1), &product) ||
        product > INT64_MAX / 8)
      throw Error(str(key, ": ", list.dump(), " has too many elements"));
  }
  return Shape(std::span<const int64_t>(sizes));
}

FileRecord get_file(const json& object) {
  FileRecord file;
  file.name = object.at("name").get<std::string>();
  file.bytes = get_size(object, "bytes");
  file.crc = get_crc(object.at("crc32c"));
  for (const json& block : get_list(object, "blocks")) file.block_crcs.push_back(get_crc(block));
  return file;
}

TensorRecord get_tensor(const json& object) {
  TensorRecord tensor;
  tensor.name = object.at("name").get<std::string>();
  const auto dtype = dtype_from_name(object.at("dtype").get_ref<const std::string&>());
  if (!dtype) throw Error(str("tensor ", tensor.name, ": unknown dtype ", object.at("dtype").dump()));
  tensor.dtype = *dtype;
  tensor.shape = get_shape(object, "shape");
  for (const json& item : get_list(object, "pieces")) {
    PieceRecord piece;
    piece.file = item.at("file").get<std::string>();
    piece.offset = get_size(item, "offset");
    piece.bytes = get_size(item, "bytes");
    piece.box = {get_shape(item, "start"), get_shape(item, "extent")};
    piece.crc = get_crc(item.at("crc32c"));
    tensor.pieces.push_back(std::move(piece));
  }
  return tensor;
}

Manifest from_json(const json& root) {
  Manifest manifest;
  manifest.step = get_size(root, "step");
  manifest.world = get_size(root, "world");
  if (const auto run = root.find("run"); run != root.end()) manifest.run = run->get<std::string>();
  if (get_size(root, "block_bytes") != kBlockBytes)
    throw Error(str("block_bytes: expected ", kBlockBytes, ", got ", root.at("block_bytes").dump()));
  for (const json& item : get_list(root, "files")) manifest.files.push_back(get_file(item));
  for (const json& item : get_list(root, "tensors")) manifest.tensors.push_back(get_tensor(item));
  return manifest;
}

std::string file_problem(const FileRecord& file) {
  if (!is_file_name(file.name)) return "file name '" + file.name + "': expected [A-Za-z0-9._-]+";
  const int64_t blocks = file.bytes / kBlockBytes + (file.bytes % kBlockBytes != 0 ? 1 : 0);
  if (file.num_blocks() != blocks)
    return str("file ", file.name, ": ", file.bytes, " bytes are ", blocks, " blocks, got ",
               file.num_blocks());
  uint32_t crc = 0;
  for (int64_t b = 0; b < blocks; b++)
    crc = crc32c_combine(crc, file.block_crcs[static_cast<size_t>(b)],
                         static_cast<uint64_t>(std::min(kBlockBytes, file.bytes - b * kBlockBytes)));
  if (crc != file.crc) return str("file ", file.name, ": its block checksums do not give its checksum");
  return "";
}

std::string tensor_problem(const Manifest& manifest, const TensorRecord& tensor) {
  const std::string where = "tensor " + tensor.name + ": ";
  if (!is_tensor_name(tensor.name))
    return where + "expected a name of [A-Za-z0-9._-]+ parts separated by '/'";
  std::vector<Box> boxes;
  for (const PieceRecord& piece : tensor.pieces) {
    const FileRecord* file = manifest.find_file(piece.file);
    if (file == nullptr)
      return where + "a piece lies in '" + piece.file + "', which is not in the list of files";
    if (piece.box.numel() * dtype_size(tensor.dtype) != piece.bytes)
      return str(where, "piece ", box_text(piece.box), " of ", tensor.dtype, " has ", piece.bytes, " bytes");
    if (piece.bytes > file->bytes || piece.offset > file->bytes - piece.bytes)
      return str(where, "piece ", box_text(piece.box), " ends behind the end of ", piece.file);
    boxes.push_back(piece.box);
  }
  const std::string coverage = coverage_problem(tensor.shape, boxes);
  return coverage.empty() ? "" : where + coverage;
}

bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
         c == '-';
}

}  // namespace

const FileRecord* Manifest::find_file(std::string_view name) const {
  const auto found =
      std::lower_bound(files.begin(), files.end(), name,
                       [](const FileRecord& file, std::string_view n) { return file.name < n; });
  return found != files.end() && found->name == name ? &*found : nullptr;
}

const TensorRecord* Manifest::find_tensor(std::string_view name) const {
  const auto found =
      std::lower_bound(tensors.begin(), tensors.end(), name,
                       [](const TensorRecord& tensor, std::string_view n) { return tensor.name < n; });
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

void Manifest::sort() {
  const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
  std::sort(files.begin(), files.end(), by_name);
  std::sort(tensors.begin(), tensors.end(), by_name);
}

std::string manifest_part_text(const Manifest& part) {
  // One line per file and tensor, so that two manifests can be compared with diff.
  const auto lines = [](const auto& items, const auto& to_json) {
    std::string text;
    for (const auto& item : items) text += (text.empty() ? "\n" : ",\n") + to_json(item).dump();
    return "[" + text + "]";
  };
  return str("{\"block_bytes\":", kBlockBytes, ",\n\"files\":", lines(part.files, file_json),
             ",\n\"format\":\"shoal-checkpoint\",\n",
             part.run.empty() ? "" : "\"run\":" + json(part.run).dump() + ",\n", "\"step\":", part.step,
             ",\n\"tensors\":", lines(part.tensors, tensor_json), ",\n\"version\":", kCheckpointVersion,
             ",\n\"world\":", part.world, "}\n");
}

Manifest parse_manifest_part(std::string_view text) {
  return from_json(json::parse(text));
}

std::string manifest_text(const Manifest& manifest) {
  const std::string text = manifest_part_text(manifest);
  return text + "crc32c " + hex(crc32c(text)) + "\n";
}

std::string manifest_problem(const Manifest& manifest) {
  for (size_t i = 0; i < manifest.files.size(); i++) {
    if (i > 0 && !(manifest.files[i - 1].name < manifest.files[i].name))
      return "file names are not sorted and unique at '" + manifest.files[i].name + "'";
    if (const std::string problem = file_problem(manifest.files[i]); !problem.empty()) return problem;
  }
  for (const char* name : {kStateName, kConfigName})
    if (manifest.find_file(name) == nullptr) return str("file ", name, " is not in the list of files");
  for (size_t i = 0; i < manifest.tensors.size(); i++) {
    if (i > 0 && !(manifest.tensors[i - 1].name < manifest.tensors[i].name))
      return "tensor names are not sorted and unique at '" + manifest.tensors[i].name + "'";
    if (const std::string problem = tensor_problem(manifest, manifest.tensors[i]); !problem.empty())
      return problem;
  }
  return "";
}

ManifestResult parse_manifest(std::string_view text) {
  ManifestResult result;
  // "crc32c " + 8 digits + "\n"
  constexpr size_t kTailBytes = 16;
  const auto fail = [&result](const std::string& problem) {
    result.problem = str(kManifestName, ": ", problem);
    return result;
  };
  if (text.size() < kTailBytes) return fail(str("expected a manifest, got ", text.size(), " bytes"));
  const std::string_view body = text.substr(0, text.size() - kTailBytes), tail = text.substr(body.size());
  const auto stored = parse_hex(tail.substr(7, 8));
  if (tail.substr(0, 7) != "crc32c " || tail.back() != '\n' || !stored)
    return fail("the last line is not 'crc32c xxxxxxxx'; the file is cut off or has bytes appended");
  if (const uint32_t actual = crc32c(body); actual != *stored)
    return fail(str("checksum mismatch: expected ", hex(*stored), ", got ", hex(actual)));
  try {
    const json root = json::parse(body);
    if (root.at("format") != "shoal-checkpoint") return fail("it does not belong to a shoal checkpoint");
    if (const int64_t version = get_size(root, "version"); version != kCheckpointVersion) {
      result.newer_version = version;
      return fail(str("format version ", version, ", this program reads version ", kCheckpointVersion));
    }
    result.manifest = from_json(root);
  } catch (const std::exception& error) {
    return fail(error.what());
  }
  if (const std::string problem = manifest_problem(result.manifest); !problem.empty()) return fail(problem);
  return result;
}

bool is_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && std::all_of(name.begin(), name.end(), is_name_char);
}

bool is_tensor_name(std::string_view name) {
  for (;;) {
    const size_t slash = name.find('/');
    if (!is_file_name(name.substr(0, slash))) return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i32, DType::i64, DType::u8})
    if (name == dtype_name(dtype)) return dtype;
  return std::nullopt;
}

std::string shard_name(int rank) {
  char name[32];
  std::snprintf(name, sizeof name, "w%04d.h5", rank);
  return name;
}

std::string step_name(int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%09lld", static_cast<long long>(step));
  return name;
}

std::optional<int64_t> step_of_name(std::string_view name) {
  if (name.size() < 14 || name.size() > 5 + 18 || name.substr(0, 5) != "step-") return std::nullopt;
  int64_t step = 0;
  for (const char c : name.substr(5)) {
    if (c < '0' || c > '9') return std::nullopt;
    step = step * 10 + (c - '0');
  }
  if (step_name(step) != name) return std::nullopt;
  return step;
}

}  // namespace shoal
