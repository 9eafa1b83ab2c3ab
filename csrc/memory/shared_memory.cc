// shared_memory.cc -- see shared_memory.h.
#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>

namespace pycomm {

namespace {

constexpr size_t small_page = 4096;
constexpr int collapse = 25;  // MADV_COLLAPSE, of Linux 6.1; older headers have no name for it

// A file's huge page is mapped as one only where address and place in the file agree in their lower bits.
void* map_file(int fd, size_t nbytes) {
  if (nbytes < huge_page) {
    void* mapping = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED) throw_errno("mmap of shared memory");
    return mapping;
  }
  void* reserved = ::mmap(nullptr, nbytes + huge_page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) throw_errno("mmap of shared memory");
  const auto begin = reinterpret_cast<uintptr_t>(reserved);
  const uintptr_t aligned = (begin + huge_page - 1) / huge_page * huge_page;
  const size_t head = aligned - begin;
  void* mapping =
      ::mmap(reinterpret_cast<void*>(aligned), nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapping == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, nbytes + huge_page);
    throw_errno("mmap of shared memory", error);
  }
  const uintptr_t end = aligned + (nbytes + small_page - 1) / small_page * small_page;
  if (head > 0) ::munmap(reserved, head);
  if (end < begin + nbytes + huge_page)
    ::munmap(reinterpret_cast<void*>(end), begin + nbytes + huge_page - end);
  return mapping;
}

}  // namespace

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
  void* mapping = map_file(fd, nbytes_);
  data_ = static_cast<std::byte*>(mapping);
  ::madvise(mapping, nbytes_, MADV_HUGEPAGE);  // a hint; refused where shmem has no huge pages
}

SharedMemory::~SharedMemory() { ::munmap(data_, nbytes_); }

// The kernel makes one huge page of small ones only where it finds one of them at least. One call for all:
// each waits for every core once.
void SharedMemory::fetch_huge_pages(size_t offset, size_t nbytes) {
  const size_t begin = (offset + huge_page - 1) / huge_page * huge_page;
  const size_t end = (offset + nbytes) / huge_page * huge_page;
  if (begin >= end) return;
  for (size_t at = begin; at < end; at += huge_page)
    static_cast<void>(*reinterpret_cast<volatile std::byte*>(data_ + at));
  ::madvise(data_ + begin, end - begin, collapse);
}

// Where the kernel cannot, the memory goes with the last mapping.
void SharedMemory::give_back(size_t offset, size_t nbytes) { ::madvise(data_ + offset, nbytes, MADV_REMOVE); }

}  // namespace pycomm
