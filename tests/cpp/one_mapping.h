// one_mapping.h -- all mappings of one file are the same mapping: see [Note: what ThreadSanitizer sees] in
// stress.cc. The program is linked with -Wl,--wrap=mmap,--wrap=munmap.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>

extern "C" void* __real_mmap(void*, size_t, int, int, int, off_t);
extern "C" int __real_munmap(void*, size_t);

namespace {

struct Mapping {
  ino_t file;
  int users;
};
std::mutex mappings_mutex;
std::map<void*, Mapping> mappings;

}  // namespace

extern "C" void* __wrap_mmap(void* at, size_t nbytes, int protection, int flags, int fd, off_t offset) {
  struct stat info{};
  if (!(flags & MAP_SHARED) || ::fstat(fd, &info) != 0)
    return __real_mmap(at, nbytes, protection, flags, fd, offset);
  std::lock_guard lock(mappings_mutex);
  for (auto& [address, mapping] : mappings)
    if (mapping.file == info.st_ino) return ++mapping.users, address;
  void* address = __real_mmap(at, nbytes, protection, flags, fd, offset);
  if (address != MAP_FAILED) mappings[address] = {info.st_ino, 1};
  return address;
}

extern "C" int __wrap_munmap(void* address, size_t nbytes) {
  std::lock_guard lock(mappings_mutex);
  auto found = mappings.find(address);
  if (found != mappings.end()) {
    if (--found->second.users > 0) return 0;
    mappings.erase(found);
  }
  return __real_munmap(address, nbytes);
}
