// owned_fd.h -- a file descriptor with one owner, and the error of a system call.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

namespace pycomm {

class OwnedFd {
 public:
  explicit OwnedFd(int fd = -1) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OwnedFd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
};

// Names the way out where a limit was met.
[[noreturn]] inline void throw_errno(const std::string& what, int error = errno) {
  const bool full = error == EMFILE || error == ENFILE;
  throw std::system_error(error, std::generic_category(),
                          "pycomm: " + what + (full ? " (no free file descriptor, see ulimit -n)" : ""));
}

}  // namespace pycomm
