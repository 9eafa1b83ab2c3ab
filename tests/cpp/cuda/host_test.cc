// host_test.cc -- csrc/cuda/device/driver.h, topology.h and ../protocol.h over the fake driver, and the fake
// driver's own streams and events.
#include <cstring>

#include "../../../csrc/cuda/budget.h"
#include "../../../csrc/cuda/device/driver.h"
#include "../../../csrc/cuda/device/spare.h"
#include "../../../csrc/cuda/protocol.h"
#include "ranks.h"

using namespace pycomm;
using namespace pycomm::cuda;

namespace {

// --- choose_protocol: which ranks sit where -> the verdict

struct Seat {
  int process, device;
};

std::vector<Place> places(const std::vector<Seat>& seats, void (*change)(Place&)) {
  std::vector<Place> all;
  for (const Seat& seat : seats) {
    Place place{};
    place.process = 100 + seat.process;
    place.pid = 1000 + seat.process;
    place.uuid.bytes[0] = static_cast<char>(seat.device);
    place.multiprocessors = 132;
    place.stream_memory_operations = 1;
    change(place);
    all.push_back(place);
  }
  return all;
}

std::vector<Seat> seats(int ranks, int ranks_per_process, int ranks_per_device) {
  std::vector<Seat> all;
  for (int r = 0; r < ranks; ++r) all.push_back({r / ranks_per_process, r / ranks_per_device});
  return all;
}

struct Case {
  const char* name;
  std::vector<Seat> seats;
  void (*change)(Place&);
  Requested requested;
  const char* verdict;  // "resident 64", or what the error says
  const char* reason;
};

void as_is(Place&) {}
void mps(Place& place) { place.mps = 1; }
void mps_in_one(Place& place) { place.mps = place.process == 100; }
void no_memory_operations(Place& place) { place.stream_memory_operations = 0; }
void few_connections(Place& place) { place.connections = 2; }
void many_connections(Place& place) { place.connections = 32; }
void too_many_connections(Place& place) { place.connections = 99; }
void small(Place& place) { place.multiprocessors = 7; }
void one_small(Place& place) { place.multiprocessors = place.process == 101 ? 20 : 132; }
void tiny_mps(Place& place) { place.multiprocessors = 3, place.mps = 1; }

std::vector<Case> protocol_cases() {
  using enum Requested;
  return {
      {"one rank", seats(1, 1, 1), as_is, automatic, "resident 64", "own device"},
      {"own devices, processes", seats(4, 1, 1), as_is, automatic, "resident 64", "own device"},
      {"own devices, threads", seats(4, 4, 1), as_is, automatic, "resident 64", "own device"},
      {"own devices, one connection is enough", seats(4, 1, 1), few_connections, automatic, "resident 64",
       "own device"},
      {"own devices, one of them small", seats(4, 1, 1), one_small, automatic, "resident 12", "own device"},
      {"threads on one device", seats(4, 4, 4), as_is, automatic, "resident 33", "threads of one process"},
      {"threads on one small device", seats(4, 4, 4), small, automatic, "resident 1",
       "threads of one process"},
      {"threads on two devices", seats(8, 8, 4), as_is, automatic, "resident 33", "threads of one process"},
      {"too few connections", seats(5, 5, 5), as_is, automatic,
       "Set CUDA_DEVICE_MAX_CONNECTIONS=32 before the first CUDA call", ""},
      {"too few connections, requested", seats(2, 2, 2), few_connections, resident,
       "need 4 hardware queues, and there are 2", ""},
      {"too few connections, stream_ordered", seats(5, 5, 5), as_is, stream_ordered,
       "CUDA_DEVICE_MAX_CONNECTIONS", ""},
      {"enough connections", seats(8, 8, 8), many_connections, automatic, "resident 16",
       "threads of one process"},
      {"16 threads", seats(16, 16, 16), many_connections, automatic, "resident 8", "threads of one process"},
      {"17 threads", seats(17, 17, 17), too_many_connections, automatic,
       "use 16 ranks per device and process or fewer", ""},
      {"processes on one device", seats(2, 1, 2), as_is, automatic, "stream_ordered 64",
       "ranks 0 and 1 are processes"},
      {"processes of two threads on one device", seats(4, 2, 4), as_is, automatic, "stream_ordered 64",
       "ranks 0 and 2 are processes"},
      {"some ranks share",
       {{0, 0}, {1, 1}, {2, 1}},
       as_is,
       automatic,
       "stream_ordered 64",
       "ranks 1 and 2 are processes"},
      {"processes on one device, resident", seats(2, 1, 2), as_is, resident, "Start MPS", ""},
      {"processes on one device, no memory operations", seats(2, 1, 2), no_memory_operations, automatic,
       "stream memory operations", ""},
      {"processes under MPS", seats(4, 1, 4), mps, automatic, "resident 33", "under MPS"},
      {"processes under MPS, resident", seats(4, 1, 4), mps, resident, "resident 33", "as requested"},
      {"MPS in one process alone", seats(2, 1, 2), mps_in_one, automatic, "stream_ordered 64", "without MPS"},
      {"more ranks than multiprocessors", seats(4, 1, 4), tiny_mps, automatic, "stream_ordered 3",
       "than it has multiprocessors"},
      {"more ranks than multiprocessors, resident", seats(4, 1, 4), tiny_mps, resident,
       "Use fewer ranks per device", ""},
      {"stream_ordered on request", seats(4, 1, 1), as_is, stream_ordered, "stream_ordered 64",
       "as requested"},
      {"stream_ordered on request, impossible", seats(4, 1, 1), no_memory_operations, stream_ordered,
       "stream memory operations", ""},
  };
}

void test_choose_protocol() {
  for (const Case& each : protocol_cases()) {
    const std::vector<Place> all = places(each.seats, each.change);
    std::string first_verdict;
    for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
      std::string verdict, reason;
      try {
        const ProtocolChoice choice = choose_protocol(all, rank, each.requested);
        verdict = std::string(to_string(choice.protocol)) + " " + std::to_string(choice.blocks);
        reason = choice.reason;
      } catch (const std::runtime_error& error) {
        verdict = error.what();
        const std::string where = "[rank " + std::to_string(rank) + "/" + std::to_string(all.size()) + "] ";
        if (verdict.rfind(where, 0) == 0) verdict = verdict.substr(where.size());
        else verdict = "no rank in: " + verdict;
      }
      if (rank == 0) first_verdict = verdict;
      const bool as_wanted = std::isdigit(each.verdict[std::strlen(each.verdict) - 1]) && *each.reason
                                 ? verdict == each.verdict
                                 : contains(verdict, each.verdict);
      expect(std::string("choose_protocol: ") + each.name + ": " + verdict + " (" + reason + ")",
             as_wanted && contains(reason, each.reason) && verdict == first_verdict);
    }
  }
}

// --- what ranks of one process share

// A process has the room of its ranks in the most crowded group it has seen, less what its groups hold.
void test_places() {
  Place here{};
  here.uuid.bytes[0] = 99;
  here.multiprocessors = 16;
  Places alone(here, 1, 1, 3), crowded(here, 1, 4, 64), again(here, 1, 1, 64), none(here, 2, 4, 5);
  expect("places: 16 for one rank", alone.count() == 3);
  expect("places: 4 where 4 processes share the device", crowded.count() == 1);
  expect("places: nothing is left", again.count() == 0 && none.count() == 0);
  crowded.keep(0);
  alone.keep(2);
  expect("places: what was given back", Places(here, 1, 1, 64).count() == 2);
  expect("places: once more", Places(here, 1, 1, 1).count() == 1);
  here.uuid.bytes[0] = 98;
  expect("places: another device", Places(here, 1, 1, 64).count() == 16);
}

// Blocks that are kept for later go where the device has no more memory.
void test_spare_blocks() {
  const auto body = [](Rank&) {
    constexpr size_t large = 600 << 20, larger = 700 << 20;
    OpenRank one(0, 2), two(0, 2);
    const DevicePtr first = allocate_block(0, large);
    free_block(0, first, large);
    require(fake_counts().allocations == 1, "a block is kept while ranks are threads");
    require(allocate_block(0, large) == first, "and used again");
    free_block(0, first, large);
    free_block(0, allocate_block(0, larger), larger);
    require(fake_counts().allocations == 1, "it makes room for another");
    require_contains(error_of([] { allocate_block(0, size_t{2} << 30); }), "CUDA_ERROR_OUT_OF_MEMORY");
  };
  expect("spare blocks", run_ranks({.ranks = 1, .before_threads = [](int) { fake_settings() = {}; }}, body));
}

// --- Topology::gather

void test_gather() {
  const auto four = [](int) { fake_settings().devices = 4, fake_settings().mps = true; };
  const auto body = [](Rank& rank) {
    const Topology topology = Topology::gather(rank.comm, rank.rank / 2 + rank.rank % 2, 5);
    require(topology.rank == rank.rank && topology.here().device == rank.rank / 2 + rank.rank % 2,
            "own place");
    require(topology.ranks_on_device(0) == 1 && topology.ranks_on_device(1) == 2 &&
                topology.ranks_on_device(2) == 2,
            "ranks on devices");
    require(topology.places[0].same_process(topology.places[1]) &&
                !topology.places[1].same_process(topology.places[2]),
            "processes");
    require(!topology.one_process() && !topology.own_devices(), "shape of the group");
    require(topology.here().mps && topology.here().connections == 5 && topology.here().capability == 90,
            "attributes");
    require_contains(topology.describe(),
                     "4 ranks, 2 processes, 3 devices; here sm_90, 16 multiprocessors, MPS");
  };
  expect("Topology::gather", run_ranks({.ranks = 4, .threads = 2, .before_threads = four}, body));

  const auto wrong = [](Rank& rank) {
    const std::string error = error_of([&] { Topology::gather(rank.comm, rank.rank == 1 ? 7 : 0, 0); });
    require_contains(error, "rank 1: device 7 does not exist; this process sees 1");
    if (rank.rank == 2) use_driver(nullptr);
    require_contains(error_of([&] { Topology::gather(rank.comm, 0, 0); }),
                     "rank 2: pycomm was built without CUDA");
    use_driver(fake_driver());
    require(Topology::gather(rank.comm, 0, 0).places.size() == 3, "the group is usable after an error");
  };
  expect("Topology::gather on a wrong device",
         run_ranks({.ranks = 3, .before_threads = [](int) { fake_settings() = {}; }}, wrong));
}

// --- driver.h, and the streams of the fake

void test_driver() {
  const auto body = [](Rank&) {
    use_driver(nullptr);
    require(driver() == nullptr && !built_with_cuda(), "no driver in this build");
    require_contains(driver_problem(), "built without CUDA");
    require_contains(error_of([] { require_driver(); }), "built without CUDA");
    use_driver(fake_driver());
    require(driver() == fake_driver() && driver_problem().empty(), "a driver");
    require(error_of([] { check(result::out_of_memory, "cuMemCreate"); }) ==
                "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory)",
            "text");
    require_contains(error_of([] { ContextGuard guard(9); }),
                     "cuDevicePrimaryCtxRetain of device 9 failed: CUDA_ERROR_INVALID_DEVICE");
    Context context = nullptr;
    const auto current = [&] { return fake_driver()->cuCtxGetCurrent(&context), context; };
    {
      ContextGuard outer(0);
      require(current() == primary_context(0), "device 0");
      {
        ContextGuard inner(1);
        require(current() == primary_context(1), "device 1");
      }
      require(current() == primary_context(0), "device 0 again");
    }
    require(current() == nullptr, "as before");
  };
  expect("driver", run_ranks({.ranks = 1, .before_threads = [](int) { fake_settings().devices = 2; }}, body));
}

void test_streams() {
  const auto body = [](Rank& rank) {
    const Driver& table = *fake_driver();
    ContextGuard guard(0);
    Stream one = nullptr, two = nullptr;
    Event event = nullptr;
    PYCOMM_CUDA_CHECK(table, cuStreamCreateWithPriority, &one, 0, 0);
    PYCOMM_CUDA_CHECK(table, cuStreamCreateWithPriority, &two, 0, 0);
    PYCOMM_CUDA_CHECK(table, cuEventCreate, &event, 0);
    alignas(8) uint32_t word = 0;
    int result = 0;
    // Stream two waits for the word that stream one writes after a slow kernel; the event says when two is
    // through.
    const auto address = reinterpret_cast<DevicePtr>(&word);
    BatchMemOp wait{flag::batch_wait, address, 5, flag::wait_geq, 0, 0};
    BatchMemOp writes[] = {{flag::batch_write, address, 3, flag::write_default, 0, 0},
                           {flag::batch_write, address, 5, flag::write_default, 0, 0}};
    PYCOMM_CUDA_CHECK(table, cuStreamBatchMemOp, two, 1, &wait, 0);
    fake_enqueue(two, [&] { result = 1; });
    PYCOMM_CUDA_CHECK(table, cuEventRecord, event, two);
    require(table.cuStreamQuery(two) == result::not_ready && table.cuEventQuery(event) == result::not_ready,
            "two waits");
    fake_enqueue(one, [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
    require(result == 0, "kernels run later");
    PYCOMM_CUDA_CHECK(table, cuStreamBatchMemOp, one, 2, writes, 0);
    PYCOMM_CUDA_CHECK(table, cuStreamWaitEvent, one, event, 0);
    fake_enqueue(one, [&] { result *= 10; });
    PYCOMM_CUDA_CHECK(table, cuStreamSynchronize, one);
    require(result == 10 && table.cuEventQuery(event) == result::success &&
                table.cuStreamQuery(two) == result::success,
            "the order");

    rank.barrier();  // a query of the other thread would end the capture
    require(!capture_of(one).active, "no capture");
    fake_capture(one, flag::capture_active, 42);
    require(capture_of(one).active && capture_of(one).id == 42 && !capture_of(two).active &&
                !capture_of(nullptr).active,
            "a capture");
    fake_capture(one, flag::capture_none, 0);
    PYCOMM_CUDA_CHECK(table, cuEventDestroy, event);
    PYCOMM_CUDA_CHECK(table, cuStreamDestroy, one);
    PYCOMM_CUDA_CHECK(table, cuStreamDestroy, two);
  };
  expect("streams and events", run_ranks({.ranks = 2, .threads = 2}, body));
}

// What the fake reports is what other tests rely on.
void test_rules() {
  const auto body = [](Rank&) {
    const Driver& table = *fake_driver();
    DevicePtr address = 0, mapped = 0;
    IpcHandle handle{};
    require(table.cuMemAlloc(&address, 10) == result::invalid_context, "no context");
    ContextGuard guard(0);
    PYCOMM_CUDA_CHECK(table, cuMemAlloc, &address, 3 << 20);
    require(table.cuIpcGetMemHandle(&handle, address + 256) == result::invalid_value, "not the base");
    PYCOMM_CUDA_CHECK(table, cuIpcGetMemHandle, &handle, address);
    require(table.cuIpcOpenMemHandle(&mapped, handle, 1) == result::invalid_context, "own handle");
    int ready[2], done[2];
    require(::pipe(ready) == 0 && ::pipe(done) == 0, "pipes");
    const pid_t child = ::fork();
    if (child == 0) {  // maps it, and has not unmapped it when the parent frees it
      use_driver(nullptr);
      use_driver(fake_driver());
      ContextGuard in_child(0);
      char byte = table.cuIpcOpenMemHandle(&mapped, handle, 1) == result::success;
      byte = ::write(ready[1], &byte, 1) == 1 && ::read(done[0], &byte, 1) == 1;
      ::_exit(0);
    }
    char byte = 0;
    require(::read(ready[0], &byte, 1) == 1 && byte == 1, "a child opens it");
    PYCOMM_CUDA_CHECK(table, cuMemFree, address);
    require_contains(fake_violations(), "has mapped by IPC");
    require(::write(done[1], &byte, 1) == 1 && ::waitpid(child, nullptr, 0) == child, "the child ends");
    fake_reset();
  };
  expect("rules of the driver", run_ranks({.ranks = 1}, body));
}

}  // namespace

int main() {
  test_choose_protocol();
  test_places();
  test_spare_blocks();
  test_gather();
  test_driver();
  test_streams();
  test_rules();
  std::printf("%d passed, %d failed\n", passes, failures);
  return failures != 0;
}
