// The functions of cuDNN that the backend calls. The program is not linked with cuDNN, whose libraries most
// runs never need: they are loaded when attention first asks for them. A program that is linked with the
// functions (the tests: with the library, or with a stand-in) uses those.
#pragma once

#include <cudnn.h>

#include <string>

namespace shoal::cuda {

struct CudnnLibrary {
  decltype(&cudnnCreate) create = nullptr;
  decltype(&cudnnDestroy) destroy = nullptr;
  decltype(&cudnnSetStream) set_stream = nullptr;
  decltype(&cudnnGetVersion) version = nullptr;
  decltype(&cudnnGetErrorString) error_string = nullptr;
  decltype(&cudnnGetLastErrorString) last_error_string = nullptr;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor = nullptr;
  decltype(&cudnnBackendSetAttribute) set_attribute = nullptr;
  decltype(&cudnnBackendGetAttribute) get_attribute = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;
};

/// Null when this process has no cuDNN of the major version that the program was compiled for, or an older
/// one than kOldestCudnn: *why says which. The answer stays the same. Thread-safe.
const CudnnLibrary* cudnn_library(std::string* why = nullptr);

/// Older ones miscompute attention backward for lengths that are no multiple of 128 unless they get a padding
/// mask.
inline constexpr size_t kOldestCudnn = 91600;

}  // namespace shoal::cuda
