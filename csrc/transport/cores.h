// cores.h -- the cores that ranks may run on, and whether they share a cache. Ranks tell each other as
// hexadecimal masks, the lowest cores first.
#pragma once

#include <string>
#include <vector>

namespace pycomm {

// Of this process. A launcher may have pinned every rank to cores of its own, so only the union over all
// ranks tells whether they outnumber the cores.
std::string allowed_cores();
// Those that share the last level cache with the first of `cores`, as the kernel describes it; empty where it
// does not. In a virtual machine that may be what the hypervisor says, not what is.
std::string cores_of_one_cache(const std::string& cores);

int count_cores(const std::vector<std::string>& masks);  // in their union
bool all_within(const std::vector<std::string>& masks, const std::string& mask);

}  // namespace pycomm
