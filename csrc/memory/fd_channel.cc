// fd_channel.cc -- see fd_channel.h.
#include "fd_channel.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace pycomm {

namespace {

struct ScopedFd {
  int fd;
  ~ScopedFd() {
    if (fd >= 0) ::close(fd);
  }
};

[[noreturn]] void throw_errno(const char* what) { throw std::system_error(errno, std::generic_category(), std::string("pycomm: ") + what); }

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero byte: no file
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

bool wait_readable(int socket, Deadline deadline) {
  for (;;) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd entry{socket, POLLIN, 0};
    int n = ::poll(&entry, 1, static_cast<int>(std::clamp<long long>(left, 0, 1000)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
    if (left <= 0) return false;
  }
}

bool send_fd(int socket, int fd) {
  char byte = 1;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  return ::sendmsg(socket, &message, MSG_NOSIGNAL) == 1;
}

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

FdServer::FdServer() : name_("pycomm-" + random_token()) {
  socket_ = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (socket_ < 0) throw_errno("UNIX socket");
  sockaddr_un address;
  socklen_t length = abstract_address(name_, address);
  if (::bind(socket_, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(socket_, 1024) != 0) {
    int error = errno;
    ::close(socket_);
    throw std::system_error(error, std::generic_category(), "pycomm: UNIX socket");
  }
}

FdServer::~FdServer() { ::close(socket_); }

int FdServer::serve(int fd, int num_peers, Deadline deadline) {
  int served = 0;
  while (served < num_peers && wait_readable(socket_, deadline)) {
    ScopedFd peer{::accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC)};
    if (peer.fd >= 0 && same_user(peer.fd) && send_fd(peer.fd, fd)) ++served;
  }
  return served;
}

int receive_fd(const std::string& server_name, Deadline deadline) {
  ScopedFd socket{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
  if (socket.fd < 0) throw_errno("UNIX socket");
  sockaddr_un address;
  socklen_t length = abstract_address(server_name, address);
  while (::connect(socket.fd, reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno != EAGAIN && errno != EINTR) throw_errno("connecting to the leader of the node");
    if (std::chrono::steady_clock::now() > deadline) throw_errno("connecting to the leader of the node timed out");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!same_user(socket.fd)) throw std::runtime_error("pycomm: the leader of the node belongs to another user");
  if (!wait_readable(socket.fd, deadline))
    throw std::runtime_error("pycomm: the leader of the node did not hand over the shared segment in time");
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received = ::recvmsg(socket.fd, &message, MSG_CMSG_CLOEXEC);
  cmsghdr* header = received == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (!header || header->cmsg_type != SCM_RIGHTS)
    throw std::runtime_error("pycomm: the leader of the node ended before it handed over the shared segment");
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  return fd;
}

}  // namespace pycomm
