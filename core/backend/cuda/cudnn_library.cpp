#include "core/backend/cuda/cudnn_library.h"

#include <dlfcn.h>

#include "core/base/error.h"

// Null where the program is not linked with them.
#pragma weak cudnnCreate
#pragma weak cudnnDestroy
#pragma weak cudnnSetStream
#pragma weak cudnnGetVersion
#pragma weak cudnnGetErrorString
#pragma weak cudnnGetLastErrorString
#pragma weak cudnnBackendCreateDescriptor
#pragma weak cudnnBackendDestroyDescriptor
#pragma weak cudnnBackendSetAttribute
#pragma weak cudnnBackendGetAttribute
#pragma weak cudnnBackendFinalize
#pragma weak cudnnBackendExecute

namespace shoal::cuda {

namespace {

struct Loaded {
  CudnnLibrary functions;
  std::string why_not;  // "": it is there
};

/// Calls visit(function, its name, what the program is linked with) for each.
template <class Visit>
void for_each_function(CudnnLibrary& f, const Visit& visit) {
  visit(f.create, "cudnnCreate", &cudnnCreate);
  visit(f.destroy, "cudnnDestroy", &cudnnDestroy);
  visit(f.set_stream, "cudnnSetStream", &cudnnSetStream);
  visit(f.version, "cudnnGetVersion", &cudnnGetVersion);
  visit(f.error_string, "cudnnGetErrorString", &cudnnGetErrorString);
  visit(f.last_error_string, "cudnnGetLastErrorString", &cudnnGetLastErrorString);
  visit(f.create_descriptor, "cudnnBackendCreateDescriptor", &cudnnBackendCreateDescriptor);
  visit(f.destroy_descriptor, "cudnnBackendDestroyDescriptor", &cudnnBackendDestroyDescriptor);
  visit(f.set_attribute, "cudnnBackendSetAttribute", &cudnnBackendSetAttribute);
  visit(f.get_attribute, "cudnnBackendGetAttribute", &cudnnBackendGetAttribute);
  visit(f.finalize, "cudnnBackendFinalize", &cudnnBackendFinalize);
  visit(f.execute, "cudnnBackendExecute", &cudnnBackendExecute);
}

Loaded load() {
  Loaded out;
  bool linked = true;
  for_each_function(out.functions, [&](auto& function, const char*, auto own) {
    function = own;
    linked = linked && own != nullptr;
  });
  if (!linked) {
    const std::string name = str("libcudnn.so.", CUDNN_MAJOR);
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays until the process ends
    if (library == nullptr) {
      const char* reason = dlerror();
      out.why_not = str("cuDNN cannot be loaded: ", reason == nullptr ? name.c_str() : reason);
      return out;
    }
    for_each_function(out.functions, [&]<class F>(F& function, const char* symbol, F) {
      function = reinterpret_cast<F>(dlsym(library, symbol));
      if (function == nullptr) out.why_not = str(name, " has no ", symbol);
    });
  }
  if (out.why_not.empty() && out.functions.version() < kOldestCudnn)
    out.why_not = str("cuDNN is of version ", out.functions.version(), ", expected at least ", kOldestCudnn);
  return out;
}

}  // namespace

const CudnnLibrary* cudnn_library(std::string* why) {
  static const Loaded loaded = load();
  if (why != nullptr) *why = loaded.why_not;
  return loaded.why_not.empty() ? &loaded.functions : nullptr;
}

}  // namespace shoal::cuda
