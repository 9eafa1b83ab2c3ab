// registered.cc -- see registered.h. One segment of world_size strides is created by rank 0 and handed to all, as for the group itself.
#include "registered.h"

#include <cstring>

#include "../memory/fd_channel.h"
#include "agree.h"

namespace pycomm {

namespace {

constexpr size_t page = 2 << 20;        // large buffers start on a huge page
constexpr size_t small_page = 4096;

}  // namespace

RegisteredBuffer allocate_registered(Communicator& comm, size_t nbytes) {
  Transport& transport = comm.transport();
  const OpInfo info{OpKind::alloc, 0};
  std::vector<uint64_t> sizes = all_gather_value<uint64_t>(comm, nbytes);
  for (int p = 0; p < comm.world_size(); ++p)
    if (sizes[p] != nbytes)
      transport.raise(ErrorKind::mismatch, info, p,
                      "nbytes=" + std::to_string(nbytes) + " here, " + std::to_string(sizes[p]) + " on rank " + std::to_string(p) +
                          ". All ranks must allocate equal sizes.");
  const size_t stride = round_up(nbytes ? nbytes : 1, nbytes >= page ? page : small_page);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                               std::chrono::duration<double>(std::min(transport.timeout(), 1e8)));
  std::unique_ptr<FdServer> server;
  std::unique_ptr<Segment> segment;
  char name[64] = {};
  if (comm.rank() == 0) {
    segment = Segment::create(Transport::region_bytes(stride, comm.world_size()));
    server = std::make_unique<FdServer>();
    std::strncpy(name, server->name().c_str(), sizeof(name) - 1);
  }
  Op op;
  op.kind = OpKind::broadcast;
  op.count = sizeof(name);
  op.in = op.out = reinterpret_cast<std::byte*>(name);
  run(comm, std::move(op));
  if (server) server->serve(segment->fd(), comm.world_size() - 1, deadline);
  else segment = Segment::open(receive_fd(name, deadline));
  std::byte* data = segment->data() + comm.rank() * stride;
  const uint32_t region = transport.add_region(std::move(segment), stride);
  std::vector<uint64_t> bases = all_gather_value(comm, reinterpret_cast<uint64_t>(data));
  for (int p = 0; p < comm.world_size(); ++p) transport.set_region_base(region, p, bases[p]);
  return {transport.region_segment(region), data, stride, region};
}

}  // namespace pycomm
