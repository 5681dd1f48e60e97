// A fault for tests: SHOAL_COLLECTIVE_FAILPOINT=<rank>:<group>:<call>:<number> kills the process of that rank
// of the job (SIGKILL) when it begins the call of that number (from 0) among those in its groups of that name
// whose text (CollectiveSignature) begins like that, e.g. 1:ep:all_to_all:7. Called by CheckedCommunicator.
#pragma once

#include <string>

#include "parallel/collective_call.h"

namespace shoal {

/// One call. Prints what it is and the dtypes of the calls before it, newest first, before it kills. Throws
/// UsageError when the variable is set to something else. Does nothing inside of another call.
class CollectivePoint {
 public:
  CollectivePoint(const std::string& group, const CollectiveSignature& signature);
  ~CollectivePoint();
  CollectivePoint(const CollectivePoint&) = delete;
  CollectivePoint& operator=(const CollectivePoint&) = delete;
};

}  // namespace shoal
