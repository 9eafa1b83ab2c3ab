// fd_channel.h -- hands file descriptors from process to process over an abstract UNIX socket (SCM_RIGHTS).
//
// A listener's name is 128 random bits that travel through the rendezvous store or the group; the kernel
// removes it with the process. Both ends check that the other belongs to the same user (SO_PEERCRED). Nobody
// speaks but the one who hands out, and one message is all that ever travels, so no end waits for a peer that
// stays silent; whoever waits for descriptors has a deadline, which is looked at before anything else.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "owned_fd.h"

namespace pycomm {

using Deadline = std::chrono::steady_clock::time_point;

// All throw std::system_error when the system refuses, most often for want of a free descriptor.
class Listener {
 public:
  Listener();
  const std::string& name() const { return name_; }
  // The next connection of this user, waiting at most `wait`. Empty: none came, or it was another user's.
  OwnedFd accept(std::chrono::nanoseconds wait);
  void close() { socket_.reset(); }  // who is connected and was not served learns of it

 private:
  OwnedFd socket_;
  std::string name_;
};

struct TooLate : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Empty: nobody listens under this name any more. std::runtime_error: the listener belongs to another user.
// TooLate: not before the deadline.
OwnedFd connect_to(const std::string& name, Deadline deadline);

bool send_fds(int socket, const std::vector<int>& fds);  // false: the other end has gone

// Empty: the other end closed the socket instead. TooLate: not before the deadline.
std::vector<OwnedFd> receive_fds(int socket, Deadline deadline);

// 128 random bits as hex.
std::string random_token();

}  // namespace pycomm
