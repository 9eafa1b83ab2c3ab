// shared_memory.cc -- see shared_memory.h.
#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

namespace pycomm {

OwnedFd create_memory_file() {
  OwnedFd file(::memfd_create("pycomm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) throw_errno("memfd_create");
  return file;
}

void resize_memory_file(int fd, size_t nbytes) {
  if (::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) throw_errno("ftruncate of shared memory");
  ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);  // no peer can make our mapping fault
}

size_t memory_file_bytes(int fd) {
  struct stat info{};
  if (::fstat(fd, &info) != 0) throw_errno("fstat of shared memory");
  return static_cast<size_t>(info.st_size);
}

SharedMemory::SharedMemory(int fd) : nbytes_(memory_file_bytes(fd)) {
  void* mapping = ::mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapping == MAP_FAILED) throw_errno("mmap of shared memory");
  data_ = static_cast<std::byte*>(mapping);
#ifdef MADV_HUGEPAGE
  ::madvise(mapping, nbytes_, MADV_HUGEPAGE);  // a hint; refused where shmem has no huge pages
#endif
}

SharedMemory::~SharedMemory() { ::munmap(data_, nbytes_); }

// Where the kernel cannot, the memory goes with the last mapping.
void SharedMemory::give_back(size_t offset, size_t nbytes) { ::madvise(data_ + offset, nbytes, MADV_REMOVE); }

}  // namespace pycomm
