// shared_memory.h -- anonymous shared memory (memfd).
//
// A memfd has no name in any file system: nothing to clean up after SIGKILL, no /dev/shm limit, no stale file
// to join by mistake. One rank creates it, the others receive the descriptor over a UNIX socket
// (fd_channel.h). A mapping needs no descriptor: each rank closes its own as soon as it has mapped the
// memory, so neither groups nor registered buffers use up descriptors.
#pragma once

#include <cstddef>
#include <memory>

#include "owned_fd.h"

namespace pycomm {

inline constexpr size_t huge_page = 2 << 20;

// Memory without a size yet. Throws std::system_error, as all here do.
OwnedFd create_memory_file();
// Gives it its size, once and for all: `nbytes` zeroed bytes. Whoever holds a descriptor sees it by
// memory_file_bytes.
void resize_memory_file(int fd, size_t nbytes);
size_t memory_file_bytes(int fd);  // 0: no size yet

class SharedMemory {
 public:
  explicit SharedMemory(int fd);  // maps all of it; the descriptor is not needed any more
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  // The whole huge pages of a part are fetched now, and as such where the kernel gives them, which takes a
  // seventh of the time that their small pages would at first use. Where it does not, those come one by one
  // as ever. What is there already stays, and may be in use meanwhile.
  void fetch_huge_pages(size_t offset, size_t nbytes);
  // Whole pages: their memory goes; they stay mapped, in all processes, and read as zeros.
  void give_back(size_t offset, size_t nbytes);

 private:
  std::byte* data_ = nullptr;
  const size_t nbytes_;
};

}  // namespace pycomm
