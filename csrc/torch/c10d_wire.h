// c10d_wire.h -- a wire over the point-to-point calls of a backend of torch.distributed: Gloo's, as it is in
// every torch (pycomm/hosts.py makes it). Nothing links against Gloo: the calls are virtual ones of c10d.
//
// What Gloo does, as measured: a receive is posted in the peer, which then sends; abort() of a work ends a
// wait() under way, or the next, after which the work can be waited for again; the time limit of a wait, once
// reached, closes all connections, so none is ever set here; a killed peer ends its connections within
// milliseconds, a lost link is not seen at all.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../hosts/wire.h"

namespace pycomm {

class C10dWire final : public Wire {
 public:
  explicit C10dWire(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  TicketPtr send(int dst, uint32_t tag, const std::byte* data, size_t nbytes) override;
  TicketPtr recv(int src, uint32_t tag, std::byte* data, size_t nbytes) override;

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace pycomm
