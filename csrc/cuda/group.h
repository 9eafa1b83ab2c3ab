// group.h -- the CUDA side of a communicator: the front of what is in this folder.
//
// Made by the first operation on device memory, which all ranks of the group must therefore issue together:
// places are compared, a protocol is chosen (setup.h), arenas are allocated and mapped
// (device/peer_memory.h). From then on the host never waits: an operation is planned (plan.h), enqueued
// (issue.h) and left to the device. Only barrier blocks.
//
//   caller's threads                      watching thread (watch.h)            device
//
//   issue(op) -> plan -> Issuer -------------------------------------------> stream: launches, exchanges
//     |                    | end: an event                                       |
//     v                    v                                                     v
//   CudaWork <--------- Works <--- every 5 ms: which have ended?             ErrorWord, in host memory
//     | wait, poll         what went wrong?  <-----------------------------------|
//     v                    are peers alive? is a line late?                      |
//   throws <---------- Faults <-- if the group is broken: ErrorWord::stop -------> every wait ends
//
// What the parts share is in state.h; locks: [Note: locks of a CUDA group] in lock.h.
#pragma once

#include "device/spare.h"
#include "issue.h"
#include "registry.h"
#include "watch.h"

namespace pycomm::cuda {

class CudaGroup final : public DeviceSide {
 public:
  // The communicator's group for `device`. Collective where it is made. Throws.
  static CudaGroup& of(Communicator& comm, Device device);
  ~CudaGroup() override;

  CudaWorkPtr issue(const Op& op, const Issue& issue);
  CudaWorkPtr issue(const MessageCall& message, const Issue& issue);
  // Blocks until all ranks have come and what is in this stream is done. Throws.
  //
  // [Note: meeting on the host first] Before a rank comes here it may be at something that waits for the
  // kernels that run: it makes a graph, loads a kernel, frees memory. Ranks that are threads share a device,
  // so a kernel that waited for that rank would stop it for ever. So the ranks meet on the host, by a count
  // in the group's shared memory, and launch their kernels then. A rank that calls something else instead is
  // not waited for longer than `patience`: the kernels find the difference.
  void barrier(const Issue& issue);

  // A kernel that is not ours and whose blocks wait for those of the peers, launched into `stream` between
  // these two by each rank at the same place among its collectives: it runs in the places of the group, so
  // behind the collectives issued before and before those issued after, whatever streams they are in.
  // enter_line() throws what is known of errors.
  void enter_line(Stream stream);
  void leave_line(Stream stream);
  // Around any such launch while a trace goes on: its `number` among them, alike on all ranks, and its times
  // on the device, within the line where it stands in it. Nothing is ordered, and nothing thrown of errors.
  void launch_begins(Stream stream, uint64_t number);
  void launch_ends(Stream stream);

  // Registered memory; collective.
  Registered allocate(size_t nbytes) { return registry_.allocate(nbytes); }
  void release(const Registered& registered);  // waits for what was issued before
  // What `peer` has at this place of registered memory; nullptr for other memory.
  std::byte* at_peer(const void* data, size_t nbytes, int peer);

  void close() override;
  bool on_own_thread() const override { return watcher_.on_own_thread(); }
  Device device() const { return state_.setup.device; }
  std::vector<std::pair<std::string, std::string>> describe() const;

 private:
  explicit CudaGroup(Setup setup);
  void make();
  void meet_on_host(double timeout) const;
  Shape make_shape() const;
  Shape shape() const;  // with what has changed since
  template <class Make>
  CudaWorkPtr enqueue(Line& line, const OpInfo& info, const Issue& issue, const Make& make_plan,
                      TracedCall& call);
  void give_back();
  void keep_for_ever();

  std::unique_ptr<OpenRank> open_;  // first: what is after it may be freed late
  GroupState state_;
  std::unique_ptr<PeerMemory> arena_;
  Shape shape_;
  Registry registry_{state_.setup, state_.lock};
  Issuer issuer_{state_};
  Watcher watcher_{state_};
  std::map<Stream, TracedCall> launches_;  // that have begun and not ended
  double setup_seconds_ = 0;
};

}  // namespace pycomm::cuda
