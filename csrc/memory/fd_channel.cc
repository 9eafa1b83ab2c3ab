// fd_channel.cc -- see fd_channel.h.
#include "fd_channel.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace pycomm {

namespace {

constexpr size_t most_fds = 4;  // in one message

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero byte: no file
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

OwnedFd new_socket() {
  OwnedFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno("UNIX socket");
  return socket;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

bool wait_readable(int socket, std::chrono::nanoseconds wait) {
  wait = std::max(wait, std::chrono::nanoseconds(0));
  const timespec limit{wait.count() / 1'000'000'000, wait.count() % 1'000'000'000};
  pollfd entry{socket, POLLIN, 0};
  return ::ppoll(&entry, 1, &limit, nullptr) > 0;
}

// One byte with descriptors beside it.
struct Message {
  char byte = 1;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(most_fds * sizeof(int))] = {};
  msghdr header{};

  explicit Message(size_t num_fds) {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(num_fds * sizeof(int));
  }
};

}  // namespace

std::string random_token() {
  unsigned char bits[16];
  if (::getrandom(bits, sizeof(bits), 0) != sizeof(bits)) throw_errno("getrandom");
  std::string hex;
  for (unsigned char b : bits) {
    hex += "0123456789abcdef"[b >> 4];
    hex += "0123456789abcdef"[b & 15];
  }
  return hex;
}

Listener::Listener() : socket_(new_socket()), name_("pycomm-" + random_token()) {
  sockaddr_un address;
  const socklen_t length = abstract_address(name_, address);
  if (::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(socket_.get(), 1024) != 0)
    throw_errno("UNIX socket");
}

OwnedFd Listener::accept(std::chrono::nanoseconds wait) {
  if (!wait_readable(socket_.get(), wait)) return OwnedFd();
  OwnedFd peer(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!peer && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
    throw_errno("accepting a rank of this node");
  return peer && same_user(peer.get()) ? std::move(peer) : OwnedFd();
}

OwnedFd connect_to(const std::string& name, Deadline deadline) {
  OwnedFd socket = new_socket();
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  while (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno == ECONNREFUSED) return OwnedFd();
    if (errno != EAGAIN && errno != EINTR) throw_errno("connecting to a rank of this node");
    if (std::chrono::steady_clock::now() > deadline)
      throw TooLate("pycomm: a rank of this node did not take a connection in time");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // its queue is full
  }
  if (!same_user(socket.get()))
    throw std::runtime_error("pycomm: a socket of the group belongs to another user");
  return socket;
}

bool send_fds(int socket, const std::vector<int>& fds) {
  if (fds.size() > most_fds) throw std::logic_error("pycomm: too many descriptors for one message");
  Message message(fds.size());
  cmsghdr* header = CMSG_FIRSTHDR(&message.header);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  if (::sendmsg(socket, &message.header, MSG_NOSIGNAL | MSG_DONTWAIT) == 1) return true;
  if (errno != EPIPE && errno != ECONNRESET) throw_errno("handing out shared memory");
  return false;
}

std::vector<OwnedFd> receive_fds(int socket, Deadline deadline) {
  constexpr auto tick = std::chrono::milliseconds(100);  // against interruptions, which end a poll
  while (!wait_readable(
      socket, std::min<std::chrono::nanoseconds>(tick, deadline - std::chrono::steady_clock::now())))
    if (std::chrono::steady_clock::now() > deadline)
      throw TooLate("pycomm: a rank of this node did not hand over shared memory in time");
  Message message(most_fds);
  const ssize_t received = ::recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (received < 0 && errno != ECONNRESET) throw_errno("receiving shared memory");
  std::vector<OwnedFd> fds;
  const cmsghdr* header = received == 1 ? CMSG_FIRSTHDR(&message.header) : nullptr;
  if (header && header->cmsg_type == SCM_RIGHTS)
    for (size_t i = 0; i < (header->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  if (message.header.msg_flags & MSG_CTRUNC) throw_errno("receiving shared memory", EMFILE);
  return fds;
}

}  // namespace pycomm
