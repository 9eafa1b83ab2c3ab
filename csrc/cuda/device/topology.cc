// topology.cc -- see topology.h.
#include "topology.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>

#include "../../communicator/agree.h"

namespace pycomm::cuda {

namespace {

int query(const Driver& table, int what, Device device) {
  int value = 0;
  PYCOMM_CUDA_CHECK(table, cuDeviceGetAttribute, &value, what, device);
  return value;
}

Place look_around(Communicator& comm, Device device, int connections) {
  const Driver& table = require_driver();
  int count = 0;
  PYCOMM_CUDA_CHECK(table, cuDeviceGetCount, &count);
  if (device < 0 || device >= count)
    throw std::runtime_error("device " + std::to_string(device) + " does not exist; this process sees " +
                             std::to_string(count));
  Place place{};
  Device handle = 0;
  PYCOMM_CUDA_CHECK(table, cuDeviceGet, &handle, device);
  PYCOMM_CUDA_CHECK(table, cuDeviceGetUuid, &place.uuid, handle);
  char name[256] = {};
  PYCOMM_CUDA_CHECK(table, cuDeviceGetName, name, sizeof(name) - 1, handle);
  place.process = comm.transport().control(comm.rank()).process_token;
  place.pid = ::getpid();
  place.device = handle;
  place.capability = 10 * query(table, attribute::compute_capability_major, handle) +
                     query(table, attribute::compute_capability_minor, handle);
  place.multiprocessors = query(table, attribute::multiprocessor_count, handle);
  place.connections = connections;
  place.mps = query(table, attribute::mps, handle) != 0;
  place.stream_memory_operations = query(table, attribute::stream_memory_operations_64, handle) != 0;
  place.multicast = query(table, attribute::multicast, handle) != 0;
  place.posix_fd_handles =
      query(table, attribute::virtual_memory, handle) && query(table, attribute::posix_fd_handles, handle);
  place.mig = std::strstr(name, " MIG ") != nullptr;
  return place;
}

}  // namespace

bool Place::same_device(const Place& other) const {
  return std::memcmp(uuid.bytes, other.uuid.bytes, sizeof(uuid.bytes)) == 0;
}

int count_on_device(const std::vector<Place>& places, const Place& at, bool one_process) {
  return static_cast<int>(std::count_if(places.begin(), places.end(), [&](const Place& other) {
    return at.same_device(other) && (!one_process || at.same_process(other));
  }));
}

int Topology::ranks_on_device(int of_rank) const { return count_on_device(places, places[of_rank], false); }

bool Topology::one_process() const {
  return std::all_of(places.begin(), places.end(),
                     [this](const Place& place) { return place.same_process(places[0]); });
}

bool Topology::own_devices() const {
  return std::all_of(places.begin(), places.end(),
                     [this](const Place& place) { return count_on_device(places, place, false) == 1; });
}

std::string Topology::describe() const {
  std::set<uint64_t> processes;
  std::set<std::string> devices;
  for (const Place& place : places) {
    processes.insert(place.process);
    devices.insert(std::string(place.uuid.bytes, sizeof(place.uuid.bytes)));
  }
  auto count = [](size_t n, const char* one, const char* many) {
    return std::to_string(n) + " " + (n == 1 ? one : many);
  };
  return count(places.size(), "rank", "ranks") + ", " + count(processes.size(), "process", "processes") +
         ", " + count(devices.size(), "device", "devices") + "; here sm_" +
         std::to_string(here().capability) + ", " +
         count(static_cast<size_t>(here().multiprocessors), "multiprocessor", "multiprocessors") +
         (here().mps ? ", MPS" : "") + (here().mig ? ", MIG" : "");
}

Topology Topology::gather(Communicator& comm, Device device, int connections) {
  struct Report {
    Verdict verdict;
    Place place;
  } mine{};
  mine.verdict = attempt([&] { mine.place = look_around(comm, device, connections); });
  const std::vector<Report> reports = all_gather_value(comm, mine);
  std::vector<Verdict> verdicts;
  Topology topology;
  topology.rank = comm.rank();
  for (const Report& each : reports) {
    verdicts.push_back(each.verdict);
    topology.places.push_back(each.place);
  }
  raise_if_failed(comm, verdicts);
  return topology;
}

}  // namespace pycomm::cuda
