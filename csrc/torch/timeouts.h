// timeouts.h -- torch's time limits as seconds.
//
// To torch 0 (kNoTimeout) and -1 ms (kUnsetTimeout) say nothing, which means the group's own limit. What is
// longer than the longest (transport.h) is cut to it: programs written for other backends ask for a century
// to say "for ever". Anything else below 0 is a mistake of the caller.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "../transport/transport.h"

namespace pycomm {

// Of one call. 0: the group's. Throws std::invalid_argument.
inline double seconds_of(std::chrono::milliseconds timeout) {
  if (timeout < c10d::kUnsetTimeout)
    throw std::invalid_argument("pycomm: the timeout " + std::to_string(timeout.count()) +
                                " ms is below 0; 0 means the group's own limit");
  if (timeout <= kNoTimeout) return 0;
  return std::min(static_cast<double>(timeout.count()) * 1e-3, longest_timeout);
}

// Of a group. Throws std::invalid_argument.
inline double seconds_of_group(std::chrono::milliseconds timeout) {
  if (timeout <= kNoTimeout)
    throw std::invalid_argument("pycomm: the timeout of a group, " + std::to_string(timeout.count()) +
                                " ms, is not above 0; nothing in pycomm waits without a limit");
  return seconds_of(timeout);
}

}  // namespace pycomm
