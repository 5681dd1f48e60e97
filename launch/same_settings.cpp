#include "launch/same_settings.h"

#include <cstdlib>

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/tensor/kernel.h"

namespace shoal {

namespace {

using Settings = std::map<std::string, std::string>;

/// "key: rank 0 has A, this rank B" of the first difference, or "".
std::string first_difference(const Settings& first, const Settings& own) {
  Settings all = first;
  all.insert(own.begin(), own.end());
  for (const auto& [key, value] : all) {
    const auto a = first.find(key), b = own.find(key);
    const std::string expected = a == first.end() ? "nothing" : a->second,
                      got = b == own.end() ? "nothing" : b->second;
    if (expected != got) return str(key, ": expected ", expected, " as on rank 0, got ", got);
  }
  return "";
}

// Of the environment, and change the bits of results.
constexpr const char* kVariables[] = {"SHOAL_ATTENTION", "SHOAL_GEMM", "SHOAL_NCCL_SUMS"};

/// "" when all variables are rank 0's.
std::string other_variable(Communicator& world, const VariableReader& read) {
  std::string found;
  const auto shown = [](const std::string& value) { return value.empty() ? "nothing" : value; };
  for (const char* name : kVariables) {
    const std::string mine = read(name), first = world.broadcast_string(mine, 0);
    if (found.empty() && mine != first)
      found =
          str("environment variable ", name, ": expected ", shown(first), " as on rank 0, got ", shown(mine));
  }
  return found;
}

}  // namespace

std::string environment_variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

void require_same_settings(const TrainConfig& config, Communicator& world, const VariableReader& read) {
  if (world.size() == 1) return;
  const std::string yaml = to_yaml(config), kernels = cpu_isa_name(cpu_isa());
  const auto settings_of = [](const std::string& text) {
    Settings settings = flat_settings(text);
    settings.erase("run.threads");
    return settings;
  };
  const std::string first_yaml = world.broadcast_string(yaml, 0);
  const std::string first_kernels = world.broadcast_string(kernels, 0);
  std::string mine;
  if (first_yaml != yaml) mine = first_difference(settings_of(first_yaml), settings_of(yaml));
  const std::string variable = other_variable(world, read);
  if (mine.empty()) mine = variable;
  if (mine.empty() && kernels != first_kernels)
    mine = str("kernels: expected ", first_kernels, " as on rank 0, got ", kernels,
               "; set SHOAL_CPU_ISA to the lower one on all ranks");
  const std::vector<std::string> found = world.gather_strings(mine);
  std::string list;
  for (size_t rank = 0; rank < found.size(); rank++) {
    if (!found[rank].empty()) list += str("\n  rank ", rank, ": ", found[rank]);
  }
  if (!list.empty())
    throw UsageError(
        str("all ranks must be started with the same settings; different are", list,
            "\n  (command lines, environment variables in the config, or copies of the file differ)"));
}

}  // namespace shoal
