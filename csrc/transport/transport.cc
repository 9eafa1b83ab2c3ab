// transport.cc -- see transport.h: the end of a group, and access to peers' memory. Joining is in join.cc.
#include "transport.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>

namespace pycomm {

namespace {

// Only ESRCH says that there is no such process any more.
[[noreturn]] void fail_copy(Transport& transport, const char* done, int error, int peer, const OpInfo& op) {
  const std::string who = transport.name(peer);
  transport.check(op);  // a peer whose operation has ended with an error may have freed its memory
  if (transport.peer_closed(peer))
    transport.fail(ErrorKind::peer, op, peer, who + " closed the group in the middle of this operation");
  if (error == ESRCH || !transport.peer_alive(peer))
    transport.fail(ErrorKind::peer, op, peer,
                   who + " died while its memory was " + done + " (" + std::strerror(error) + ")");
  transport.fail(ErrorKind::none, op, peer,
                 "the memory of " + who + " cannot be " + done +
                     " by process_vm_readv and process_vm_writev (" + std::strerror(error) +
                     "). Set PYCOMM_CMA=0 on all ranks, or pass memory that no device driver has mapped");
}

}  // namespace

Transport::Transport(Identity identity, const TransportOptions& options, const Terms& terms,
                     std::unique_ptr<SharedMemory> memory, Lives lives)
    : identity_(std::move(identity)),
      options_(options),
      timeout_(options.timeout),
      terms_(terms),
      memory_(std::move(memory), Layout::make(identity_.world_size, terms.budget, terms.lanes)),
      health_(identity_, memory_, std::move(lives)),
      waiting_(identity_, memory_, health_, terms.cores),
      hand_off_(identity_, memory_, waiting_),
      regions_(identity_, health_) {
  if (terms_.primary) begin_primary_group();
}

// In a forked child the page is the parent's.
Transport::~Transport() {
  if (!forked()) give_back(status_);
  close();
}

void Transport::set_lives(Lives lives) {
  const Life* life = lives.life.get();
  const Whole& whole = identity_.whole;
  status_ = take_status_row(life ? life->page() : nullptr, name(), number(rank()),
                            identity_.part() ? whole.world_size : world_size());
  waiting_.set_status(status_);
  health_.set_lives(std::move(lives));
}

void Transport::close() {
  if (status_ && !forked()) status_->used.store(status_closed);  // another thread may still write there
  if (health_.close() && terms_.primary && !forked()) end_primary_group();
}

void Transport::ring_all() {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // [Note: no lost wake-up], wait.h
  ring_all_sleepers(memory_);
}

void Transport::read_peer(int peer, const void* remote, void* local, size_t nbytes, const OpInfo& op) {
  size_t done = 0;
  while (done < nbytes) {
    iovec to{static_cast<std::byte*>(local) + done, nbytes - done};
    iovec from{const_cast<std::byte*>(static_cast<const std::byte*>(remote)) + done, nbytes - done};
    ssize_t n = ::process_vm_readv(control(peer).pid, &to, 1, &from, 1, 0);
    if (n <= 0) fail_copy(*this, "read", n < 0 ? errno : EFAULT, peer, op);
    done += static_cast<size_t>(n);
  }
}

bool Transport::may_read(int peer) const {
  uint64_t token = 0;
  const iovec local{&token, sizeof(token)};
  const iovec remote{reinterpret_cast<void*>(control(peer).probe_address), sizeof(token)};
  return ::process_vm_readv(control(peer).pid, &local, 1, &remote, 1, 0) >= 0 ||
         (errno != EPERM && errno != ENOSYS);
}

void Transport::write_peer(int peer, void* remote, const void* local, size_t nbytes, const OpInfo& op) {
  size_t done = 0;
  while (done < nbytes) {
    iovec from{const_cast<std::byte*>(static_cast<const std::byte*>(local)) + done, nbytes - done};
    iovec to{static_cast<std::byte*>(remote) + done, nbytes - done};
    ssize_t n = ::process_vm_writev(control(peer).pid, &from, 1, &to, 1, 0);
    if (n <= 0) fail_copy(*this, "written", n < 0 ? errno : EFAULT, peer, op);
    done += static_cast<size_t>(n);
  }
}

}  // namespace pycomm
