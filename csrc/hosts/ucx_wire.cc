// ucx_wire.cc -- see ucx_wire.h.
#include "ucx_wire.h"

#include "ucx_worker.h"

namespace pycomm {

namespace {

constexpr uint32_t greeting_tag = 0xffffffff;

}  // namespace

UcxContext::UcxContext(const std::string& file,
                       const std::vector<std::pair<std::string, std::string>>& settings, int peers)
    : library_(ucx::Library::open(file)) {
  ucx::Config* config = nullptr;
  ucx::check(library_, library_.config_read(nullptr, nullptr, &config), "its settings (UCX_...)");
  for (const auto& [name, value] : settings)
    (void)library_.config_modify(config, name.c_str(), value.c_str());
  ucx::ContextParams params{};
  params.field_mask = ucx::ContextParams::has_features | ucx::ContextParams::has_estimated_num_eps;
  params.features = ucx::feature_tag | ucx::feature_wakeup;
  params.estimated_num_eps = peers;
  const ucx::Status status =
      library_.init_version(ucx::api_major, ucx::api_minor, &params, config, &context_);
  library_.config_release(config);
  ucx::check(library_, status, "it finds no network");
}

UcxContext::~UcxContext() { library_.cleanup(context_); }

UcxWire::UcxWire(std::shared_ptr<UcxContext> context, int rank, int world_size, int spins)
    : context_(std::move(context)), worker_(std::make_shared<UcxWorker>(context_, rank, world_size, spins)) {}

UcxWire::~UcxWire() { close(); }

void UcxWire::close() { worker_->end(); }

std::string UcxWire::address() { return worker_->address(); }

TicketPtr UcxWire::send(int dst, uint32_t tag, const std::byte* data, size_t nbytes) {
  return worker_->send(worker_, dst, tag, data, nbytes);
}

TicketPtr UcxWire::recv(int src, uint32_t tag, std::byte* data, size_t nbytes) {
  return worker_->recv(worker_, src, tag, data, nbytes);
}

void UcxWire::connect(const std::map<int, std::string>& addresses) {
  for (const auto& [peer, address] : addresses) worker_->connect(peer, address);
  for (const auto& [peer, address] : addresses) {
    Greeting& greeting = greetings_[peer];
    greeting.hears = recv(peer, greeting_tag, &greeting.got, 1);
    greeting.sends = send(peer, greeting_tag, &greeting.sent, 1);
  }
}

std::vector<int> UcxWire::missing() {
  std::vector<int> peers;
  for (const auto& [peer, greeting] : greetings_)
    if (!worker_->done(*greeting.hears) || !worker_->done(*greeting.sends)) peers.push_back(peer);
  if (peers.empty()) greetings_.clear();
  return peers;
}

}  // namespace pycomm
