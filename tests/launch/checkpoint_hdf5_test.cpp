#include "launch/checkpoint_hdf5.h"

#include <hdf5.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <thread>

#include "launch/checkpoint_shard.h"
#include "tests/launch/checkpoint_support.h"

namespace shoal {

using test::TempFolder;

namespace {

std::vector<DatasetSpec> example_specs() {
  return {{"model/a", DType::f32, {{2, 0}, {3, 5}}, {7, 5}, 0},
          {"model/layers.0/b", DType::bf16, {{0}, {4096}}, {4096}, 0},
          {"optim/m/model/a", DType::f64, {{0, 0, 1}, {2, 2, 2}}, {2, 2, 3}, 0},
          {"optim/step", DType::i64, {{}, {}}, {}, 0},
          {"data/empty", DType::u8, {{0, 0}, {0, 4}}, {0, 4}, 0},
          {"router/counts", DType::i32, {{0}, {9}}, {9}, 0},
          {"router/flags", DType::u8, {{0}, {5}}, {5}, 0},
          {"meta/config.yaml", {}, {}, {}, 11},
          {"meta/empty.txt", {}, {}, {}, 0}};
}

struct Written {
  std::vector<DatasetSpec> specs = example_specs();
  std::vector<std::vector<uint8_t>> values;
};

// The example as a file whose datasets hold known bytes.
Written write_example(const test::fs::path& path) {
  Written written;
  const ShardLayout layout = make_shard_layout(written.specs);
  std::vector<FileSegment> segments;
  for (const auto& [offset, bytes] : layout.metadata)
    segments.push_back({offset, static_cast<int64_t>(bytes.size()), bytes.data()});
  for (const DatasetSpec& spec : written.specs) {
    written.values.emplace_back(static_cast<size_t>(spec.bytes()));
    for (size_t b = 0; b < written.values.back().size(); b++)
      written.values.back()[b] = static_cast<uint8_t>(spec.dtype ? 7 * b + spec.path.size() : 'a' + b % 26);
  }
  for (size_t i = 0; i < written.specs.size(); i++)
    if (written.specs[i].bytes() > 0)
      segments.push_back({layout.offsets[i], written.specs[i].bytes(), written.values[i].data()});
  std::sort(segments.begin(), segments.end(), [](auto& a, auto& b) { return a.offset < b.offset; });
  std::vector<uint32_t> crcs;
  write_checkpoint_file(path, segments, crcs, [](const std::string&) {});
  return written;
}

std::string output_of(const std::string& command, int& status) {
  std::string text;
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  std::array<char, 4096> buffer{};
  while (const size_t got = std::fread(buffer.data(), 1, buffer.size(), pipe))
    text.append(buffer.data(), got);
  status = pclose(pipe);
  return text;
}

}  // namespace

TEST(CheckpointHdf5, LibhdfReadsEveryValueThatWasWrittenBesideIt) {
  const TempFolder folder;
  const Written written = write_example(folder / "w0000.h5");
  const hid_t file = H5Fopen((folder / "w0000.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  ASSERT_GE(file, 0);
  for (size_t i = 0; i < written.specs.size(); i++) {
    const DatasetSpec& spec = written.specs[i];
    const hid_t dataset = H5Dopen2(file, spec.path.c_str(), H5P_DEFAULT);
    ASSERT_GE(dataset, 0) << spec.path;
    const hid_t space = H5Dget_space(dataset), type = H5Dget_type(dataset);
    const auto count = H5Sget_simple_extent_npoints(space);
    std::vector<uint8_t> bytes(static_cast<size_t>(count) * H5Tget_size(type), 0xAA);
    if (!bytes.empty()) {
      ASSERT_GE(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()), 0);
    }
    if (spec.dtype) {
      EXPECT_EQ(count, spec.box.numel()) << spec.path;
      EXPECT_EQ(H5Sget_simple_extent_ndims(space), spec.box.extent.dims());
    }
    if (spec.bytes() > 0) {
      EXPECT_EQ(bytes, written.values[i]) << spec.path;
    }
    if (spec.dtype) {
      const hid_t attribute = H5Aopen(dataset, "dtype", H5P_DEFAULT), text_type = H5Aget_type(attribute);
      std::string name(H5Tget_size(text_type), ' ');
      H5Aread(attribute, text_type, name.data());
      EXPECT_EQ(name, dtype_name(*spec.dtype));
      H5Tclose(text_type);
      H5Aclose(attribute);
    }
    H5Tclose(type);
    H5Sclose(space);
    H5Dclose(dataset);
  }
  const hid_t dataset = H5Dopen2(file, "model/a", H5P_DEFAULT),
              start = H5Aopen(dataset, "start", H5P_DEFAULT);
  std::array<int64_t, 2> at{};
  H5Aread(start, H5T_NATIVE_INT64, at.data());
  EXPECT_EQ(at, (std::array<int64_t, 2>{2, 0}));
  H5Aclose(start);
  H5Dclose(dataset);
  EXPECT_GE(H5Fclose(file), 0);
}

TEST(CheckpointHdf5, TheOrdinaryToolsOpenTheFile) {
  int status = 0;
  if (output_of("command -v h5dump && command -v h5ls", status).empty() || status != 0)
    GTEST_SKIP() << "SKIPPED: h5dump and h5ls are not installed (package hdf5-tools)";
  const TempFolder folder;
  write_example(folder / "w0000.h5");
  const std::string path = (folder / "w0000.h5").string();
  const std::string listing = output_of("h5ls -r " + path, status);
  EXPECT_EQ(status, 0) << listing;
  for (const char* line :
       {"/model/a                 Dataset {3, 5}", "/model/layers.0/b        Dataset {4096}",
        "/data/empty              Dataset {0, 4}", "/optim/step              Dataset {SCALAR}"})
    EXPECT_NE(listing.find(line), std::string::npos) << listing;
  const std::string dump = output_of("h5dump -p -d /meta/config.yaml -d /router/counts " + path, status);
  EXPECT_EQ(status, 0) << dump;
  EXPECT_NE(dump.find("abcdefghijk"), std::string::npos) << dump;
  EXPECT_NE(dump.find("H5T_STD_I32LE"), std::string::npos) << dump;
  EXPECT_NE(dump.find("CONTIGUOUS"), std::string::npos) << dump;
}

TEST(CheckpointHdf5, EqualSpecsGiveEqualBytesAlsoFromThreads) {
  const TempFolder folder;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++)
    threads.emplace_back([&folder, i] { write_example(folder / std::to_string(i)); });
  for (auto& thread : threads) thread.join();
  const std::string first = test::read_all(folder / "0");
  EXPECT_FALSE(first.empty());
  for (const char* name : {"1", "2", "3"}) EXPECT_EQ(test::read_all(folder / name), first);
}

TEST(CheckpointHdf5, LargeDatasetsAreAlignedAndTheLayoutTakesNoMemoryForThem) {
  // 64 GiB of tensors: the layout is only metadata.
  const std::vector<DatasetSpec> specs = {
      {"a", DType::f32, {{0}, {int64_t{1} << 33}}, {int64_t{1} << 33}, 0},
      {"b", DType::f32, {{0}, {int64_t{1} << 33}}, {int64_t{1} << 33}, 0}};
  const ShardLayout layout = make_shard_layout(specs);
  EXPECT_EQ(layout.offsets[0] % 4096, 0);
  EXPECT_EQ(layout.offsets[1] % 4096, 0);
  EXPECT_GE(layout.file_bytes, int64_t{1} << 36);
  int64_t metadata = 0;
  for (const auto& [offset, bytes] : layout.metadata) metadata += static_cast<int64_t>(bytes.size());
  EXPECT_LT(metadata, 65536);
}

TEST(CheckpointHdf5, ThousandsOfDatasetsKeepTheOverheadSmall) {
  std::vector<DatasetSpec> specs;
  for (int i = 0; i < 3000; i++)
    specs.push_back({str("model/layers.", i / 10, ".w", i % 10), DType::f32, {{0}, {i % 7}}, {i % 7}, 0});
  const ShardLayout layout = make_shard_layout(specs);
  EXPECT_LT(layout.file_bytes, int64_t{3000} * 2048);
}

TEST(CheckpointHdf5, AnImpossibleDatasetIsAnErrorThatNamesIt) {
  try {
    make_shard_layout({{"a", DType::f32, {{0}, {4}}, {4}, 0}, {"a", DType::f32, {{0}, {4}}, {4}, 0}});
    FAIL() << "the same path twice";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("HDF5: creating dataset a failed"), std::string::npos)
        << error.what();
  }
}

TEST(CheckpointHdf5, AFileSizeLimitDoesNotReachLibhdf) {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{1000, 1000};  // no SIGXFSZ either: nothing is written to a file
    setrlimit(RLIMIT_FSIZE, &limit);
    _exit(make_shard_layout(example_specs()).file_bytes > 1000 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace shoal
