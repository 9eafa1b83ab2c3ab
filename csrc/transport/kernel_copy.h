// kernel_copy.h -- how the kernel's copies between processes (process_vm_readv) compare with those through
// shared memory.
#pragma once

#include <cstddef>

namespace pycomm {

// Measured here and now, in some 50 us, and before in this process: one copy by the kernel takes less than
// three of memcpy, whatever lies on the heap. It has to pin every page, which costs a fifth of the copy on
// some machines and four times the copy on others.
bool kernel_copies_fast();

// Whether the kernel lets processes of the same user copy from and to this one: no longer once it has changed
// its user (setuid) or has asked for it (PR_SET_DUMPABLE), at whatever time. Costs a system call.
bool kernel_admits_peers();

// Whether the kernel can copy from this memory of the caller's: it cannot where a device driver has mapped
// what has no pages of its own (EFAULT), and does not where a sandbox forbids it. Looks at both ends, and
// remembers the last thousand that were right.
bool kernel_reaches(const void* data, size_t nbytes);

}  // namespace pycomm
