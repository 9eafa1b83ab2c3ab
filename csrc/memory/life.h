// life.h -- proof of life: record locks on an empty memfd, the life file of a group.
//
// [Note: liveness by record locks] Every process holds a POSIX record lock on one byte of the life file per
// rank that it has. The kernel drops it when the process ends in whatever way, before any other process could
// see it gone, and F_GETLK tells a survivor so without a signal, a thread or a descriptor per peer. A socket
// pair, the usual means, fails for trainers: a forked DataLoader worker inherits the socket and keeps it open
// after its parent died, whereas record locks are not inherited by fork.
//
// [Note: one life file for many groups] A lock says that a process lives, not which group it is in. So a
// further group of processes that all hold locks in one life file already uses that file, and costs no
// descriptor; the ranks find out when they meet (transport/rendezvous.h). The file has a page for each byte,
// in which the process says what it is in (transport/status_page.h), and no memory of the group for which it
// was made.
//
// [Note: closing drops locks] POSIX drops all locks of a process on a file when it closes *any* descriptor of
// that file. Ranks that are threads of one process receive a descriptor each. So all of them are kept, in a
// registry, until the last hold of the process goes, and are closed under the registry's mutex: another
// thread that takes a hold meanwhile would lose its lock at once. A lock on a byte goes with the last hold on
// that byte. A forked child starts with an empty registry, since it holds no locks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "owned_fd.h"

namespace pycomm {

// What processes compare to find a file in which all of them hold a lock.
struct LifeRef {
  std::string name;  // of the file: random, and the same in all processes
  int byte;
};

// A hold of this process on one byte of a life file. Its end drops the lock, unless there are further holds.
class Life {
 public:
  static OwnedFd create_file();  // throws std::system_error
  // Takes the descriptor and locks the byte. Throws std::runtime_error: another process holds it.
  Life(const std::string& name, OwnedFd file, int byte);
  ~Life();
  Life(const Life&) = delete;

  // One further hold on a byte of each file in which this process holds one, oldest first, `most` at most.
  static std::vector<std::unique_ptr<Life>> hold_again(size_t most);
  const LifeRef& ref() const { return ref_; }
  int fd() const;  // to hand it to other processes
  // The page of this byte, mapped while it is held, zeroed at first; nullptr where there was no memory.
  std::byte* page() const;

  bool held(int byte) const;  // some process, or a thread of this one, is alive as `byte`

 private:
  struct File;
  struct Registry;
  Life(Registry& registry, std::shared_ptr<File> file, int byte);

  Registry& registry_;
  std::shared_ptr<File> file_;
  LifeRef ref_;
};

}  // namespace pycomm
