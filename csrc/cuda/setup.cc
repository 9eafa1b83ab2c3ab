// setup.cc -- see setup.h.
#include "setup.h"

#include <stdexcept>

#include "../communicator/agree.h"
#include "kernels/layout.h"

namespace pycomm::cuda {

namespace {

constexpr size_t default_staging = 16 << 20;

Requested requested_protocol(const std::string& name) {
  if (name.empty()) return Requested::automatic;
  if (name == "resident") return Requested::resident;
  if (name == "stream_ordered") return Requested::stream_ordered;
  throw std::invalid_argument("PYCOMM_CUDA_PROTOCOL=" + name + ": must be resident or stream_ordered");
}

// What each rank was told or found by itself must be alike.
void compare_settings(const Setup& setup) {
  struct Settings {
    uint64_t staging_bytes, protocol, blocks;
  };
  const auto all = all_gather_value(
      setup.comm, Settings{staging_bytes(setup.comm), static_cast<uint64_t>(setup.protocol.protocol),
                           static_cast<uint64_t>(setup.protocol.blocks)});
  auto text = [](const Settings& s) {
    return "staging_bytes=" + std::to_string(s.staging_bytes) +
           " protocol=" + to_string(static_cast<Protocol>(s.protocol)) +
           " blocks=" + std::to_string(s.blocks);
  };
  for (int p = 1; p < setup.world_size(); ++p)
    if (text(all[p]) != text(all[0]))
      setup.comm.transport().raise(ErrorKind::mismatch, {OpKind::alloc, 0}, p,
                                   text(all[0]) + " on rank 0, " + text(all[p]) + " on rank " +
                                       std::to_string(p) +
                                       ". All ranks must have the same settings for CUDA tensors.");
}

// Collective. Takes the places of a resident kernel on devices that are shared (budget.h); returns how many
// each rank has.
int take_places(Setup& setup) {
  const Topology& topology = setup.topology;
  const int ranks = topology.ranks_on_my_device(), wanted = setup.protocol.blocks;
  int mine = max_blocks;
  if (ranks > 1 && !setup.stream_ordered() && setup.world_size() > 1) {
    const int ranks_here = count_on_device(topology.places, topology.here(), true);
    setup.places = std::make_shared<Places>(topology.here(), ranks_here, ranks, wanted);
    mine = setup.places->count() < std::min(least_places, wanted) ? 0 : setup.places->count();
  }
  int all = max_blocks;
  for (const int each : all_gather_value(setup.comm, mine)) all = std::min(all, each);
  if (setup.places) setup.places->keep(all);
  return all;
}

}  // namespace

size_t staging_bytes(const Communicator& comm) {
  const size_t wanted = comm.transport().device_options().staging_bytes;
  return wanted ? wanted : default_staging;
}

Setup agree_on_setup(Communicator& comm, Device device) {
  Transport& transport = comm.transport();
  const DeviceOptions& options = transport.device_options();
  Setup setup{comm, device, require_driver(), {}, {}, nullptr};
  if (comm.world_size() > max_ranks)
    throw std::invalid_argument(transport.where({}) + "groups with CUDA tensors have at most " +
                                std::to_string(max_ranks) + " ranks, this one has " +
                                std::to_string(comm.world_size()));
  setup.topology = Topology::gather(comm, device, options.connections);
  auto choose = [&](int room) {
    agree(comm, attempt([&] {
            setup.protocol = choose_protocol(setup.topology.places, comm.rank(),
                                             requested_protocol(options.protocol), room);
          }));
  };
  choose(max_blocks);
  choose(take_places(setup));
  compare_settings(setup);
  return setup;
}

}  // namespace pycomm::cuda
