// ucx_wire.h -- a wire over UCX's messages with tags (UCP): TCP, and InfiniBand or RoCE where UCX finds them.
//
//   UcxContext   of a group and rank: which networks may be used
//   UcxWire      one worker (UCX's word for a set of connections and what they share), one endpoint for each
//                peer. Two per leader: the data and the leaders' words have connections of their own
//
// Making one (pycomm/hosts/ucx.py): every rank publishes its worker's address in the store, makes endpoints
// to the ranks that it exchanges messages with, and sends a greeting to each. A wire is used when all
// greetings have come: so all connections exist before the first operation, and a fault is one of making the
// group.
//
// Who moves the bytes, how waits end, and what becomes of memory: ucx_worker.h.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ucx_api.h"
#include "wire.h"

namespace pycomm {

class UcxWorker;

class UcxContext {
 public:
  // settings: UCX's names without the prefix; those that this UCX does not know are left out. Throws
  // std::runtime_error.
  UcxContext(const std::string& file, const std::vector<std::pair<std::string, std::string>>& settings,
             int peers);
  ~UcxContext();
  UcxContext(const UcxContext&) = delete;

  const ucx::Library& library() const { return library_; }
  ucx::Context* get() const { return context_; }

 private:
  const ucx::Library& library_;
  ucx::Context* context_ = nullptr;
};

class UcxWire final : public Wire {
 public:
  // spins: of a waiter, before it sleeps; 0 where ranks outnumber the cores.
  UcxWire(std::shared_ptr<UcxContext> context, int rank, int world_size, int spins);
  ~UcxWire() override;
  void close();  // sooner than the destructor, which may hold Python's lock

  std::string address();
  std::string version() const { return context_->library().version(); }
  // Endpoints to these peers (rank -> address), and greetings on their way. Throws WireError.
  void connect(const std::map<int, std::string>& addresses);
  std::vector<int> missing();  // peers whose greetings have not come, or ours not gone. Throws WireError

  TicketPtr send(int dst, uint32_t tag, const std::byte* data, size_t nbytes) override;
  TicketPtr recv(int src, uint32_t tag, std::byte* data, size_t nbytes) override;

 private:
  struct Greeting {
    std::byte sent{}, got{};
    TicketPtr sends, hears;
  };
  const std::shared_ptr<UcxContext> context_;
  const std::shared_ptr<UcxWorker> worker_;
  std::map<int, Greeting> greetings_;
};

}  // namespace pycomm
