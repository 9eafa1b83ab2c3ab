// registered.cc -- see registered.h. One piece of shared memory of world_size strides is created by rank 0
// and handed to all, each of whom has opened a socket for it.
//
// A step may fail on one rank alone, most often for want of a descriptor or of memory. So every step ends
// with the verdicts of all, and no rank waits outside of these exchanges: what rank 0 sends lies in the
// sockets before the others look. A failure raises on every rank, and leaves nothing on any.
#include "registered.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "../memory/fd_channel.h"
#include "agree.h"

namespace pycomm {

namespace {

constexpr size_t small_page = 4096;
const OpInfo info{OpKind::alloc, 0};

struct Offer {
  uint64_t nbytes = 0;
  Verdict verdict;
  char socket[64] = {};  // where the rank wants the descriptor
};

struct Mapped {
  Verdict verdict;
  uint64_t base = 0;
  uint32_t next_region = 0;
};

template <class Values>
std::vector<Verdict> verdicts_of(const Values& values) {
  std::vector<Verdict> verdicts;
  for (const auto& value : values) verdicts.push_back(value.verdict);
  return verdicts;
}

Deadline deadline_of(const Transport& transport) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             std::chrono::duration<double>(std::min(transport.timeout(), 1e8)));
}

std::string difference(size_t here, size_t there, int peer) {
  return "nbytes=" + std::to_string(here) + " here, " + std::to_string(there) + " on rank " +
         std::to_string(peer) + ". All ranks must allocate equal sizes.";
}

void check_sizes(const Transport& transport, const std::vector<Offer>& offers) {
  const uint64_t nbytes = offers[transport.rank()].nbytes;
  for (int p = 0; p < transport.world_size(); ++p)
    if (offers[p].nbytes != nbytes)
      transport.raise(ErrorKind::mismatch, info, p,
                      difference(nbytes, offers[p].nbytes, transport.number(p)));
}

void hand_out(const std::vector<Offer>& offers, int file, Deadline deadline) {
  for (size_t p = 1; p < offers.size(); ++p) {
    const OwnedFd socket = connect_to(offers[p].socket, deadline);
    if (!socket || !send_fds(socket.get(), {file}))
      throw std::runtime_error("rank " + std::to_string(p) + " does not take the memory");
  }
}

// What the rank that has connected hands over: it lies there already. Others of this user may connect, too.
OwnedFd take_file(Listener& listener, Deadline deadline) {
  while (std::chrono::steady_clock::now() < deadline) {
    const OwnedFd socket = listener.accept(std::chrono::milliseconds(1));
    if (!socket) continue;
    std::vector<OwnedFd> files = receive_fds(socket.get(), deadline);
    if (!files.empty()) return std::move(files[0]);
  }
  throw std::runtime_error("rank 0 did not hand over the memory in time");
}

// Each host has memory for its own ranks.
RegisteredBuffer allocate_on_hosts(Communicator& comm, size_t nbytes) {
  const std::vector<uint64_t> sizes = all_gather_value<uint64_t>(comm, nbytes);
  for (int p = 0; p < comm.world_size(); ++p)
    if (sizes[p] != nbytes) comm.raise(ErrorKind::mismatch, info, p, difference(nbytes, sizes[p], p));
  Communicator& inside = comm.hosts_side()->inside();
  RegisteredBuffer buffer;
  struct Tried {
    Verdict verdict;
    int rank = -1;  // that has failed, where it is known
  };
  Tried mine;
  mine.verdict = attempt([&] {
    try {
      buffer = allocate_registered(inside, nbytes);
    } catch (const CommError& error) {
      mine.rank = error.peer;
      const std::string text =
          error.what();  // "[rank ..] alloc: rank 1: what it lacks", 1 as the host counts
      const size_t place = text.rfind("rank "), end = text.find(": ", place);
      throw std::runtime_error(end == std::string::npos ? text : text.substr(end + 2));
    }
  });
  const std::vector<Tried> all = all_gather_value(comm, mine);
  for (int p = 0; p < comm.world_size(); ++p) {
    if (all[p].verdict.ok()) continue;
    if (buffer.memory) inside.transport().drop_region(buffer.region);
    const int rank = all[p].rank < 0 ? p : all[p].rank;
    comm.raise(ErrorKind::none, info, rank, "rank " + std::to_string(rank) + ": " + all[p].verdict.text);
  }
  return buffer;
}

}  // namespace

RegisteredBuffer allocate_registered(Communicator& comm, size_t nbytes) {
  if (comm.hosts_side()) return allocate_on_hosts(comm, nbytes);
  Transport& transport = comm.transport();
  const size_t stride = round_up(nbytes ? nbytes : 1, nbytes >= huge_page ? huge_page : small_page);
  const Deadline deadline = deadline_of(transport);
  const bool creates = comm.rank() == 0;
  OwnedFd file;
  std::optional<Listener> listener;

  Offer mine{nbytes, {}, {}};
  mine.verdict = attempt([&] {
    if (!creates) {
      listener.emplace();
      std::strncpy(mine.socket, listener->name().c_str(), sizeof(mine.socket) - 1);
      return;
    }
    file = create_memory_file();
    resize_memory_file(file.get(), Transport::region_bytes(stride, comm.world_size()));
  });
  const std::vector<Offer> offers = all_gather_value(comm, mine);
  check_sizes(transport, offers);
  raise_if_failed(comm, verdicts_of(offers), info);

  agree(comm, attempt([&] {
          if (creates) hand_out(offers, file.get(), deadline);
        }));

  std::shared_ptr<SharedMemory> memory;
  Mapped mapped;
  mapped.next_region = transport.next_region();
  mapped.verdict = attempt([&] {
    if (!creates) file = take_file(*listener, deadline);
    memory = std::make_shared<SharedMemory>(file.get());
    mapped.base = reinterpret_cast<uint64_t>(memory->data() + comm.rank() * stride);
    memory->fetch_huge_pages(comm.rank() * stride, nbytes);
  });
  const std::vector<Mapped> all = all_gather_value(comm, mapped);
  raise_if_failed(comm, verdicts_of(all), info);
  uint32_t region = 0;
  std::vector<uint64_t> bases;
  for (const Mapped& each : all) {
    region = std::max(region, each.next_region);
    bases.push_back(each.base);
  }
  transport.add_region(region, memory, stride, std::move(bases));
  return {memory, reinterpret_cast<std::byte*>(mapped.base), stride, region};
}

}  // namespace pycomm
