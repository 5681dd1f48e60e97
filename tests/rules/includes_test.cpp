// Who may include whom: the folders form layers without cycles, and each external library stays in its place.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <regex>
#include <set>

#include "core/base/error.h"
#include "core/base/text.h"
#include "tests/rules/source_tree.h"

namespace shoal::rules {

namespace {

// Folder -> the folders it may include, itself apart.
const std::map<std::string, std::set<std::string>>& allowed_folders() {
  static const std::set<std::string> core = {"core/base", "core/tensor", "core/autograd", "core/nn",
                                             "core/ops"};
  auto with = [](std::set<std::string> folders, std::initializer_list<const char*> more) {
    folders.insert(more.begin(), more.end());
    return folders;
  };
  static const std::map<std::string, std::set<std::string>> allowed = {
      {"core/base", {}},
      {"core/tensor", {"core/base"}},
      {"core/autograd", {"core/base", "core/tensor"}},
      {"core/nn", {"core/base", "core/tensor", "core/autograd"}},
      {"core/ops", {"core/base", "core/tensor", "core/autograd"}},
      {"core/backend/functors", {}},
      {"core/backend/cpu",
       {"core/base", "core/tensor", "core/autograd", "core/ops", "core/backend/functors"}},
      {"core/backend/cuda",
       {"core/base", "core/tensor", "core/autograd", "core/ops", "core/backend/functors"}},
      {"parallel", core},
      {"models", with(core, {"parallel"})},
      {"optim", with(core, {"parallel"})},
      {"data", core},
      {"launch", with(core, {"parallel", "models", "optim", "data"})},
  };
  return allowed;
}

// "core/base/error.h" -> "core/base"; "parallel/moe/x.h" -> "parallel"; "" for files of no folder.
std::string folder_of(const std::string& path) {
  std::string best;
  for (const auto& [folder, _] : allowed_folders())
    if (path.starts_with(folder + "/") && folder.size() > best.size()) best = folder;
  if (best.empty() && path.starts_with("tests/")) best = "tests";
  return best;
}

std::vector<std::string> folder_violations(const SourceFile& file) {
  std::vector<std::string> found;
  const std::string from = folder_of(file.path);
  if (from.empty() || from == "tests") return found;
  for (const auto& include : includes_of(file)) {
    const std::string to = folder_of(include.target);
    if (include.angled || to.empty() || to == from || allowed_folders().at(from).contains(to)) continue;
    found.push_back(
        violation(file, include.line, str(from, " may not include ", to, " (", include.target, ")")));
  }
  return found;
}

// Where the headers of an external library may be included. The tests may attack files and ranks directly.
struct Confinement {
  std::string what, headers, places;  // regular expressions over the include and over the including file
};
const std::vector<Confinement> kConfinements = {
    {"MPI", R"(^mpi\.h$)", R"(^(parallel/(mpi_communicator|bootstrap)[^/]*|tests/.*)$)"},
    {"HDF5", R"(^(hdf5|H5\w+|hdf5_hl)\.h$)",
     R"(^(launch/[^/]*(checkpoint|hdf5)[^/]*|launch/main\.cpp|tests/.*)$)"},
    {"CUDA and NCCL", R"(^(cuda.*|cublas.*|nccl.*|cooperative_groups.*|cub/.*|cudnn.*)$)",
     R"(^(core/backend/cuda/.*|parallel/nccl_(communicator|group)\..*|tests/cuda/.*)$)"},
    {"yaml-cpp", R"(^yaml-cpp/)", R"(^core/base/yaml\.cpp$)"},
    {"CBLAS", R"(^(cblas|f77blas|lapacke?|openblas.*)\.h$)", R"(^core/backend/cpu/gemm/.*$)"},
    {"LIBXSMM", R"(^libxsmm)", R"(^core/backend/cpu/gemm/.*$)"},
    {"Oniguruma", R"(^onig)", R"(^(data|tests)/.*$)"},
    {"CLI11", R"(^CLI/)", R"(^(launch|tests/bench)/.*$)"},
    {"JSON", R"(^nlohmann/)", R"(^(core/base/config_schema\.cpp|(data|launch|tests)/.*)$)"},
    {"GoogleTest", R"(^(gtest|gmock)/)", R"(^tests/.*$)"},
    {"Google Benchmark", R"(^benchmark/)", R"(^tests/.*$)"},
};

std::vector<std::string> library_violations(const SourceFile& file) {
  std::vector<std::string> found;
  for (const auto& include : includes_of(file))
    for (const auto& rule : kConfinements)
      if (std::regex_search(include.target, std::regex(rule.headers)) &&
          !std::regex_match(file.path, std::regex(rule.places)))
        found.push_back(violation(file, include.line,
                                  str(rule.what, " headers do not belong here (", include.target, ")")));
  return found;
}

using Graph = std::map<std::string, std::set<std::string>>;

// One cycle as "a -> b -> a", or "".
std::string find_cycle(const Graph& graph) {
  std::set<std::string> done;
  std::vector<std::string> path;
  std::function<std::string(const std::string&)> visit = [&](const std::string& node) -> std::string {
    const auto at = std::find(path.begin(), path.end(), node);
    if (at != path.end()) return join({at, path.end()}, " -> ") + " -> " + node;
    if (done.contains(node)) return "";
    path.push_back(node);
    if (const auto it = graph.find(node); it != graph.end())
      for (const auto& next : it->second)
        if (const auto cycle = visit(next); !cycle.empty()) return cycle;
    path.pop_back();
    done.insert(node);
    return "";
  };
  for (const auto& [node, _] : graph)
    if (const auto cycle = visit(node); !cycle.empty()) return cycle;
  return "";
}

template <class Rule>
std::vector<std::string> check_all(const Rule& rule) {
  std::vector<std::string> found;
  for (const auto& file : all_sources()) {
    if (!file.is_cpp()) continue;
    const auto more = rule(file);
    found.insert(found.end(), more.begin(), more.end());
  }
  return found;
}

}  // namespace

TEST(IncludeRules, FoldersIncludeOnlyLowerLayers) {
  const auto found = check_all(folder_violations);
  EXPECT_TRUE(found.empty()) << listing(found);
}

TEST(IncludeRules, ExternalLibrariesStayInTheirPlace) {
  const auto found = check_all(library_violations);
  EXPECT_TRUE(found.empty()) << listing(found);
}

TEST(IncludeRules, IncludesNameExistingFilesFromTheTop) {
  std::set<std::string> paths = {"version.h"};  // generated by the build
  for (const auto& file : all_sources()) paths.insert(file.path);
  const auto found = check_all([&](const SourceFile& file) {
    std::vector<std::string> missing;
    for (const auto& include : includes_of(file))
      if (!include.angled && !paths.contains(include.target))
        missing.push_back(
            violation(file, include.line, str("'", include.target, "' is no path from the top")));
    return missing;
  });
  EXPECT_TRUE(found.empty()) << listing(found);
}

TEST(IncludeRules, NeitherFoldersNorFilesFormCycles) {
  Graph folders, files;
  for (const auto& file : all_sources()) {
    if (!file.is_cpp()) continue;
    for (const auto& include : includes_of(file)) {
      if (include.angled || include.target == file.path) continue;
      files[file.path].insert(include.target);
      const auto from = folder_of(file.path), to = folder_of(include.target);
      if (!to.empty() && from != to) folders[from].insert(to);
    }
  }
  EXPECT_EQ(find_cycle(folders), "");
  EXPECT_EQ(find_cycle(files), "");
}

TEST(IncludeRules, AViolationIsFoundAndNamed) {
  EXPECT_EQ(folder_violations(make_source("data/x.cpp", "\n#include \"models/model.h\"\n")),
            std::vector<std::string>{"data/x.cpp:2: data may not include models (models/model.h)"});
  EXPECT_EQ(folder_violations(make_source("parallel/moe/x.cpp", "#include \"launch/metrics.h\"\n")).size(),
            1U);
  EXPECT_EQ(folder_violations(make_source("core/base/x.h", "#include \"core/tensor/tensor.h\"\n")).size(),
            1U);
  EXPECT_TRUE(folder_violations(make_source("models/moe/x.h", "#include \"parallel/moe/y.h\"\n")).empty());
  EXPECT_EQ(library_violations(make_source("models/x.cpp", "#include <mpi.h>\n")).size(), 1U);
  EXPECT_EQ(library_violations(make_source("parallel/x.cpp", "#include <cuda_runtime.h>\n")).size(), 1U);
  EXPECT_EQ(library_violations(make_source("launch/x.cpp", "#include <yaml-cpp/yaml.h>\n")).size(), 1U);
  EXPECT_TRUE(library_violations(make_source("parallel/bootstrap.cpp", "#include <mpi.h>\n")).empty());
  EXPECT_EQ(find_cycle({{"a", {"b"}}, {"b", {"c"}}, {"c", {"b"}}}), "b -> c -> b");
  EXPECT_EQ(find_cycle({{"a", {"b", "c"}}, {"b", {"c"}}}), "");
}

}  // namespace shoal::rules
