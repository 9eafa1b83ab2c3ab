// fd_channel.h -- hands one file descriptor from a leader to its peers over an abstract UNIX socket (SCM_RIGHTS).
//
// The socket's name is 128 random bits that travel through the rendezvous store; the kernel removes it with the process. Both
// ends check that the other belongs to the same user (SO_PEERCRED).
#pragma once

#include <chrono>
#include <string>

namespace pycomm {

using Deadline = std::chrono::steady_clock::time_point;

class FdServer {
 public:
  FdServer();
  ~FdServer();
  FdServer(const FdServer&) = delete;
  const std::string& name() const { return name_; }
  // Serves fd to `num_peers` peers. Returns how many came before the deadline.
  int serve(int fd, int num_peers, Deadline deadline);

 private:
  int socket_;
  std::string name_;
};

// Throws std::runtime_error when no descriptor came before the deadline or the server belongs to another user.
int receive_fd(const std::string& server_name, Deadline deadline);

// 128 random bits as hex.
std::string random_token();

}  // namespace pycomm
