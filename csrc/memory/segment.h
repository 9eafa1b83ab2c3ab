// segment.h -- anonymous shared memory (memfd) and the proof of life that is attached to it.
//
// A memfd has no name in any file system: nothing to clean up after SIGKILL, no /dev/shm limit, no stale file to join by
// mistake. One rank creates it, the others receive the descriptor over a UNIX socket (fd_channel.h).
//
// [Note: liveness by record locks] Every process holds a POSIX record lock on byte `rank` of the segment. The kernel drops it
// when the process ends in whatever way, before any other process could see it gone, and F_GETLK tells a survivor so without
// a signal, a thread or a descriptor per peer. A socket pair, the usual means, fails for trainers: a forked DataLoader worker inherits the
// socket and keeps it open after its parent died, whereas record locks are not inherited by fork.
// POSIX drops all locks of a process on a file when it closes *any* descriptor of that file, so ranks that are
// threads of one process share one descriptor through a registry (segment.cc).
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace pycomm {

class Segment {
 public:
  // Creates a segment of nbytes zeroed bytes. Throws std::system_error.
  static std::unique_ptr<Segment> create(size_t nbytes);
  // Maps a segment received from a peer and takes ownership of the descriptor.
  static std::unique_ptr<Segment> open(int fd);
  ~Segment();
  Segment(const Segment&) = delete;

  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  int fd() const;
  void give_back(size_t offset, size_t nbytes);  // whole pages: their memory; they stay mapped, in all processes, and read as zeros

  void hold_lock(int byte);         // this process is alive as `byte`
  bool lock_held(int byte) const;   // some other process is alive as `byte`

 private:
  struct SharedFd;
  Segment(std::shared_ptr<SharedFd> fd, size_t nbytes);
  std::shared_ptr<SharedFd> fd_;
  std::byte* data_ = nullptr;
  size_t nbytes_ = 0;
};

}  // namespace pycomm
