// Damaged checkpoints: whatever is changed in the newest one, it is detected and named, and the one before it
// is found instead.
#include <gtest/gtest.h>

#include "launch/checkpoint_folder.h"
#include "launch/checkpoint_format.h"
#include "launch/crc32c.h"
#include "tests/launch/checkpoint_support.h"
#include "tests/support/error_of.h"

namespace shoal {

using test::TempFolder;
using testing::error_of;
namespace fs = std::filesystem;

namespace {

std::vector<test::Logical> small_model() {
  return {{"model/w", DType::f32, {40, 3}, 0},
          {"model/norm", DType::bf16, {7}},
          {"optim/m/w", DType::f32, {40, 3}, 0}};
}

void save_steps(const fs::path& folder, const std::vector<int64_t>& steps, int world = 2) {
  run_ranks(world, [&](const std::shared_ptr<Communicator>& group) {
    CheckpointStore store({folder}, *group);
    for (const int64_t step : steps)
      EXPECT_EQ(
          store.save(step,
                     test::make_state(small_model(), group->rank(), world, true, static_cast<uint64_t>(step)),
                     str("{\"step\":", step, "}"), "seed: 1\n"),
          "");
  });
}

/// Steps 10 and 20, and a way to damage 20 again and again.
class Damage {
 public:
  Damage() {
    save_steps(folder_.path(), {10, 20});
    for (const std::string& name : test::names_in(newest()))
      originals_[name] = test::read_all(newest() / name);
    EXPECT_EQ(originals_.size(), 5U);
  }
  fs::path newest() const { return folder_ / "step-000000020"; }
  fs::path older() const { return folder_ / "step-000000010"; }
  const fs::path& folder() const { return folder_.path(); }
  const std::map<std::string, std::string>& originals() const { return originals_; }

  /// Step 10 is found; the one line about step 20 names `file`. Then step 20 is put back as it was.
  void expect_detected(const std::string& file, const std::string& what) {
    const auto group = make_single_communicator();
    CheckpointStore store({folder_.path()}, *group);
    const auto found = store.find();
    ASSERT_TRUE(found) << what;
    EXPECT_EQ(found->step, 10) << what;
    EXPECT_EQ(found->state_json, "{\"step\":10}");
    ASSERT_EQ(found->rejected.size(), 1U) << what;
    EXPECT_EQ(found->rejected[0].find("step-000000020: "), 0U) << found->rejected[0];
    EXPECT_NE(found->rejected[0].find(file), std::string::npos) << what << ": " << found->rejected[0];
    EXPECT_NE(found->rejected[0].find("set aside as step-000000020.bad-1"), std::string::npos);
    auto state = test::make_state(small_model(), 0, 1, false);
    store.load(*found, state);
    test::expect_state(small_model(), state, 10);
    restore();
  }

  void restore() {
    fs::remove_all(newest());
    fs::remove_all(folder_ / "step-000000020.bad-1");
    fs::create_directory(newest());
    for (const auto& [name, bytes] : originals_) test::write_all(newest() / name, bytes);
  }

 private:
  TempFolder folder_;
  std::map<std::string, std::string> originals_;
};

}  // namespace

TEST(CheckpointDamage, TheRestoredCheckpointIsFoundSoDetectionIsNotByAccident) {
  Damage damage;
  damage.restore();
  const auto group = make_single_communicator();
  CheckpointStore store({damage.folder()}, *group);
  EXPECT_EQ(store.find()->step, 20);
}

TEST(CheckpointDamage, TwoHundredBitFlipsAtRandomPlacesAreAllDetected) {
  Damage damage;
  const RandomStream random(11, "flips");
  uint64_t draw = 0;
  int trials = 0;
  for (const auto& [name, bytes] : damage.originals()) {
    for (int trial = 0; trial < 40; trial++, trials++) {
      const uint64_t bit = random.below(draw++, bytes.size() * 8);
      std::string changed = bytes;
      changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
      test::write_all(damage.newest() / name, changed);
      damage.expect_detected(name, str(name, " bit ", bit));
    }
  }
  EXPECT_EQ(trials, 200);
  if (!HasFailure()) std::printf("seed 11: 200 bit flips: 200 detected\n");
}

namespace {

// Where something in the file begins or ends: lines of texts; tensors and HDF5's blocks in the shards.
std::vector<uint64_t> structural_sizes(const Manifest& manifest, const std::string& name,
                                       const std::string& bytes) {
  std::set<uint64_t> sizes = {0, 1, bytes.size() - 1};
  const auto add = [&](uint64_t size) {
    if (size < bytes.size()) sizes.insert(size);
  };
  if (name.ends_with(".h5")) {
    for (const TensorRecord& tensor : manifest.tensors)
      for (const PieceRecord& piece : tensor.pieces) {
        if (piece.file != name) continue;
        add(static_cast<uint64_t>(piece.offset));
        add(static_cast<uint64_t>(piece.offset + piece.bytes));
      }
    for (const uint64_t size : {8U, 48U, 96U, 512U, 2048U, 4096U}) add(size);
  } else {
    for (size_t at = 0; (at = bytes.find('\n', at)) != std::string::npos; at++) {
      add(at);
      add(at + 1);
    }
  }
  return {sizes.begin(), sizes.end()};
}

}  // namespace

TEST(CheckpointDamage, TruncationAtTwoHundredOffsetsIsDetected) {
  Damage damage;
  const RandomStream random(12, "cuts");
  const Manifest manifest = read_manifest(damage.newest()).manifest;
  uint64_t draw = 0;
  size_t structural = 0, trials = 0;
  for (const auto& [name, bytes] : damage.originals()) {
    std::vector<uint64_t> sizes = structural_sizes(manifest, name, bytes);
    sizes.resize(std::min<size_t>(sizes.size(), 20));
    structural += sizes.size();
    while (sizes.size() < 40) sizes.push_back(random.below(draw++, bytes.size()));
    for (const uint64_t size : sizes) {
      test::write_all(damage.newest() / name, bytes.substr(0, size));
      damage.expect_detected(name, str(name, " cut to ", size));
      trials++;
    }
  }
  EXPECT_EQ(trials, 200U);
  if (!HasFailure())
    std::printf("seed 12: 200 truncations (%zu at structural offsets): 200 detected\n", structural);
}

TEST(CheckpointDamage, ZeroedPagesAndAppendedBytesAreDetected) {
  Damage damage;
  for (const auto& [name, bytes] : damage.originals()) {
    for (const char* tail : {"\n", "x", "crc32c 00000000\n"}) {
      test::write_all(damage.newest() / name, bytes + tail);
      damage.expect_detected(name, name + " with bytes appended");
    }
    for (const char fill : {'\0', '\xFF'}) {
      std::string changed = bytes;
      const size_t at = changed.size() / 2;
      std::fill_n(changed.begin() + static_cast<int64_t>(at), std::min<size_t>(4096, changed.size() - at),
                  fill);
      if (changed == bytes) continue;
      test::write_all(damage.newest() / name, changed);
      damage.expect_detected(name, name + " with a page overwritten");
    }
  }
}

TEST(CheckpointDamage, ReplacedDeletedAndForeignFilesAreDetected) {
  Damage damage;
  for (const auto& [name, bytes] : damage.originals()) {
    fs::remove(damage.newest() / name);
    damage.expect_detected(name, name + " deleted");
    fs::remove(damage.newest() / name);
    fs::create_directory(damage.newest() / name);
    damage.expect_detected(name, name + " replaced by a directory");
    fs::remove(damage.newest() / name);
    fs::create_symlink(damage.older() / name, damage.newest() / name);
    damage.expect_detected(name, name + " replaced by a link");
    if (name == kConfigName) continue;  // the same in both steps
    test::write_all(damage.newest() / name, test::read_all(damage.older() / name));
    damage.expect_detected(name, name + " of another step");
  }
  test::write_all(damage.newest() / "w0000.h5", damage.originals().at("w0001.h5"));
  test::write_all(damage.newest() / "w0001.h5", damage.originals().at("w0000.h5"));
  damage.expect_detected("w0000.h5", "swapped shards");
  for (const auto& [name, bytes] : damage.originals()) fs::remove(damage.newest() / name);
  damage.expect_detected("MANIFEST.json", "an empty directory");
}

TEST(CheckpointDamage, SeveralRanksAgreeOnTheVerdict) {
  const TempFolder folder;
  save_steps(folder.path(), {10, 20, 30}, 3);
  // Each in a file that another rank reads.
  for (const char* name : {"step-000000030/w0002.h5", "step-000000020/w0001.h5"}) {
    std::string bytes = test::read_all(folder / name);
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
    test::write_all(folder / name, bytes);
  }
  run_ranks(3, [&](const std::shared_ptr<Communicator>& group) {
    CheckpointStore store({folder.path()}, *group);
    const auto found = store.find();
    ASSERT_TRUE(found);
    EXPECT_EQ(found->step, 10);
    ASSERT_EQ(found->rejected.size(), 2U);
    EXPECT_NE(found->rejected[0].find("w0002.h5: checksum mismatch in bytes [0, "), std::string::npos);
    EXPECT_NE(found->rejected[1].find("w0001.h5: checksum mismatch in bytes [0, "), std::string::npos);
    auto state = test::make_state(small_model(), group->rank(), 3, false);
    store.load(*found, state);
    test::expect_state(small_model(), state, 10);
  });
}

TEST(CheckpointDamage, WhenAllAreBadTheReasonsAreListedAndNothingStartsAtStepZero) {
  const TempFolder folder;
  save_steps(folder.path(), {10, 20});
  fs::remove(folder / "step-000000010/state.json");
  fs::resize_file(folder / "step-000000020/w0001.h5", 100);
  run_ranks(2, [&](const std::shared_ptr<Communicator>& group) {
    CheckpointStore store({folder.path()}, *group);
    const std::string text = error_of([&] { store.find(); });
    EXPECT_NE(text.find("none of 2 verifies: step-000000020: w0001.h5: expected "), std::string::npos)
        << text;
    EXPECT_NE(text.find("step-000000010/state.json: cannot open: No such file"), std::string::npos) << text;
  });
  EXPECT_EQ(test::names_in(folder.path()),
            (std::set<std::string>{"step-000000010.bad-1", "step-000000020.bad-1"}));
  // Directories set aside are no checkpoints, but the run has not never been saved either.
  const auto group = make_single_communicator();
  CheckpointStore store({folder.path()}, *group);
  EXPECT_NE(error_of([&] { store.find(); }).find("step-000000020.bad-1"), std::string::npos);
}

TEST(CheckpointDamage, AnExplicitStepThatIsCorruptIsAnErrorAndStaysInPlace) {
  const TempFolder folder;
  save_steps(folder.path(), {10, 20});
  fs::resize_file(folder / "step-000000020/w0001.h5", 100);
  const auto group = make_single_communicator();
  CheckpointStore store({folder.path()}, *group);
  const std::string text = error_of([&] { store.find(20); });
  EXPECT_NE(text.find("is corrupt: w0001.h5: expected "), std::string::npos) << text;
  EXPECT_TRUE(fs::exists(folder / "step-000000020"));
  EXPECT_EQ(store.find(10)->step, 10);
}

TEST(CheckpointDamage, ANewerFormatIsRefusedAndLeftInPlace) {
  const TempFolder folder;
  save_steps(folder.path(), {10, 20});
  std::string text = test::read_all(folder / "step-000000020/MANIFEST.json");
  text.replace(text.find("\"version\":1"), 11, "\"version\":2");
  text.resize(text.size() - 16);
  char tail[24];
  std::snprintf(tail, sizeof tail, "crc32c %08x\n", crc32c(text));
  test::write_all(folder / "step-000000020/MANIFEST.json", text + tail);
  const auto group = make_single_communicator();
  CheckpointStore store({folder.path()}, *group);
  EXPECT_EQ(
      error_of([&] { store.find(); }),
      str("checkpoint ", (folder / "step-000000020").string(),
          ": MANIFEST.json: format version 2, this program reads version 1; use the program that wrote it, "
          "or move it out of the folder to go on from an older one"));
  EXPECT_TRUE(fs::exists(folder / "step-000000020"));
  EXPECT_EQ(store.find(10)->step, 10);
}

TEST(CheckpointDamage, AFileThatChangesAfterVerificationIsNoticedWhenLoading) {
  const TempFolder folder;
  save_steps(folder.path(), {10});
  const auto group = make_single_communicator();
  CheckpointStore store({folder.path()}, *group);
  const auto found = store.find();
  // The last bytes of the file are tensor bytes or HDF5's; flip a byte of a piece through the manifest.
  const ManifestResult manifest = read_manifest(found->path);
  const PieceRecord& piece = manifest.manifest.find_tensor("model/w")->pieces[0];
  std::string bytes = test::read_all(found->path / piece.file);
  bytes[static_cast<size_t>(piece.offset) + 5] ^= 1;
  test::write_all(found->path / piece.file, bytes);
  auto state = test::make_state(small_model(), 0, 1, false);
  const std::string text = error_of([&] { store.load(*found, state); });
  EXPECT_NE(text.find("tensor model/w, piece [0, 0] + [20, 3]: checksum mismatch"), std::string::npos)
      << text;
}

TEST(CheckpointDamage, FilesOutOfReachAreNotTakenForCorrupt) {
  for (const int number : {EACCES, EMFILE, ENFILE, ENOMEM, ESTALE, ETIMEDOUT})
    EXPECT_FALSE(says_corrupt(FileError("w0000.h5", "open", number))) << number;
  for (const int number : {ENOENT, EIO, ELOOP, EISDIR})
    EXPECT_TRUE(says_corrupt(FileError("w0000.h5", "open", number))) << number;
  EXPECT_FALSE(says_corrupt(std::bad_alloc()));
  EXPECT_TRUE(says_corrupt(Error("w0000.h5: checksum mismatch")));
}

}  // namespace shoal
