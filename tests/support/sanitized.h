// Whether this test is instrumented: figures of memory and of time say little then.
#pragma once

namespace shoal::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace shoal::testing
