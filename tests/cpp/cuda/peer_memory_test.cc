// peer_memory_test.cc -- csrc/cuda/device/peer_memory.h over the fake driver.
#include "../../../csrc/cuda/device/peer_memory.h"

#include <cstring>

#include "ranks.h"

using namespace pycomm;
using namespace pycomm::cuda;

namespace {

constexpr size_t nbytes = 100000;

using Memory = std::unique_ptr<PeerMemory>;

Memory make(Rank& rank, int device = 0, bool multicast = false) {
  const Topology topology = Topology::gather(rank.comm, device, 32);
  return PeerMemory::create(rank.comm, topology, nbytes, multicast);
}

unsigned char value(int writer, int owner, size_t i) {
  return static_cast<unsigned char>(writer * 37 + owner * 11 + i);
}

void fill(std::byte* memory, size_t nbytes, int writer, int owner) {
  for (size_t i = 0; i < nbytes; ++i) memory[i] = std::byte{value(writer, owner, i)};
}

bool holds(const std::byte* memory, size_t nbytes, int writer, int owner) {
  bool all = true;
  for (size_t i = 0; i < nbytes; ++i) all = all && memory[i] == std::byte{value(writer, owner, i)};
  return all;
}

// Every rank fills its part of every rank's memory; then every rank reads everything. (Fake device memory is
// the host's, too.)
void exercise(Rank& rank, const PeerMemory& memory) {
  const size_t part = nbytes / rank.world_size;
  for (int p = 0; p < rank.world_size; ++p)
    require(memory.address(p) != nullptr, "an address of rank " + std::to_string(p));
  const std::byte* own = memory.address(rank.rank);
  bool zeroed = true;
  for (size_t i = 0; i < nbytes; ++i) zeroed = zeroed && own[i] == std::byte{0};
  require(zeroed, "zeroed memory");
  rank.barrier();
  for (int p = 0; p < rank.world_size; ++p) fill(memory.address(p) + rank.rank * part, part, rank.rank, p);
  rank.barrier();
  for (int owner = 0; owner < rank.world_size; ++owner)
    for (int writer = 0; writer < rank.world_size; ++writer)
      require(holds(memory.address(owner) + writer * part, part, writer, owner), "what others wrote");
}

// All blocks are gone everywhere once all ranks have dropped theirs.
void drop(Rank& rank, Memory& memory) {
  rank.barrier();  // nobody reads any more
  memory.reset();
  rank.barrier();
  require(PeerMemory::free_parked() == 0, "no parked memory after all ranks have ended");
  rank.barrier();
}

std::function<void(int)> with(bool ipc, bool vmm, int devices = 1, bool peer_access = true,
                              bool multicast = false) {
  return [=](int) {
    FakeSettings& settings = fake_settings();
    settings = {};
    settings.ipc = ipc;
    settings.vmm = vmm;
    settings.devices = devices;
    settings.peer_access = peer_access;
    settings.multicast = multicast;
  };
}

std::string label(const char* what, int ranks, int threads) {
  return std::string(what) + ", " + std::to_string(ranks) + " ranks, " + std::to_string(threads) +
         " per process";
}

struct Shape {
  int ranks, threads;
  int processes() const { return (ranks + threads - 1) / threads; }
};
constexpr Shape shapes[] = {{1, 1}, {2, 1}, {2, 2}, {3, 1}, {3, 3}, {3, 2},
                            {4, 1}, {4, 4}, {4, 2}, {8, 1}, {8, 8}, {8, 4}};

void test_ways() {
  for (const Shape shape : shapes)
    for (const auto& [ipc, vmm] : {std::pair{true, true}, {false, true}, {true, false}}) {
      const auto body = [&](Rank& rank) {
        Memory memory = make(rank);
        exercise(rank, *memory);
        for (int p = 0; p < rank.world_size; ++p) {
          const bool near = p / shape.threads == rank.rank / shape.threads;
          const cuda::Access wanted = p == rank.rank ? cuda::Access::own
                                      : near         ? cuda::Access::same_process
                                      : ipc          ? cuda::Access::cuda_ipc
                                                     : cuda::Access::vmm_fd;
          require(memory->access(p) == wanted,
                  "access to rank " + std::to_string(p) + " in " + memory->describe());
        }
        drop(rank, memory);
      };
      const bool well =
          run_ranks({.ranks = shape.ranks, .threads = shape.threads, .before_threads = with(ipc, vmm)}, body);
      expect(label(ipc ? vmm ? "all ways" : "IPC alone" : "VMM alone", shape.ranks, shape.threads), well);
    }
}

void test_no_way() {
  for (const Shape shape : shapes) {
    const auto body = [&](Rank& rank) {
      if (shape.processes() == 1) {
        Memory memory = make(rank);
        exercise(rank, *memory);
        return drop(rank, memory);
      }
      const std::string error = error_of([&] { make(rank); });
      require_contains(error, "[rank " + std::to_string(rank.rank) + "/" + std::to_string(rank.world_size) +
                                  "] alloc: no way");
      require_contains(error, "cuda_ipc: rank 0: cuIpcOpenMemHandle failed: CUDA_ERROR_MAP_FAILED");
      require_contains(error, "vmm_fd: rank 0: the device does not export memory");
      rank.barrier();
    };
    expect(label("no way", shape.ranks, shape.threads),
           run_ranks({.ranks = shape.ranks, .threads = shape.threads, .before_threads = with(false, false)},
                     body));
  }
}

// One call of the driver fails on one rank: the other way is taken, or all ranks have an error that names
// rank and call.
void test_failures() {
  struct Failure {
    const char* function;
    int nth;
    bool of_ipc;  // else of VMM
  };
  constexpr Failure failures[] = {{"cuMemAlloc", 1, true},
                                  {"cuMemsetD8Async", 1, true},
                                  {"cuMemcpyAsync", 1, true},
                                  {"cuMemcpyAsync", 2, true},
                                  {"cuIpcGetMemHandle", 1, true},
                                  {"cuIpcOpenMemHandle", 1, true},
                                  {"cuIpcOpenMemHandle", 2, true},
                                  {"cuStreamSynchronize", 1, true},
                                  {"cuMemGetAllocationGranularity", 1, false},
                                  {"cuMemCreate", 1, false},
                                  {"cuMemAddressReserve", 1, false},
                                  {"cuMemMap", 1, false},
                                  {"cuMemSetAccess", 1, false},
                                  {"cuMemExportToShareableHandle", 1, false},
                                  {"cuMemImportFromShareableHandle", 1, false},
                                  {"cuMemImportFromShareableHandle", 2, false},
                                  {"cuMemAddressReserve", 3, false},
                                  {"cuMemMap", 2, false},
                                  {"cuMemSetAccess", 3, false}};
  for (const Failure& failure : failures)
    for (int victim : {0, 2})
      for (bool other_way : {true, false}) {
        const auto before = with(failure.of_ipc || other_way, !failure.of_ipc || other_way);
        const auto body = [&](Rank& rank) {
          if (!failure.of_ipc && other_way) return;  // IPC is tried first: VMM would not be used
          const Topology topology = Topology::gather(rank.comm, 0, 0);
          if (rank.rank == victim) fake_fail(failure.function, failure.nth, result::out_of_memory);
          if (other_way) {
            Memory memory = PeerMemory::create(rank.comm, topology, nbytes);
            exercise(rank, *memory);
            require(memory->access((rank.rank + 1) % 3) == cuda::Access::vmm_fd, "VMM is used instead");
            return drop(rank, memory);
          }
          const std::string error = error_of([&] { PeerMemory::create(rank.comm, topology, nbytes); });
          require_contains(error, std::string(failure.of_ipc ? "cuda_ipc" : "vmm_fd") + ": rank " +
                                      std::to_string(victim) + ": " + failure.function +
                                      " failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
          require(fake_counts().total() == 0, "nothing is left: " + fake_counts().describe());
          Memory memory = PeerMemory::create(rank.comm, topology, nbytes);  // the failure is over
          exercise(rank, *memory);
          drop(rank, memory);
        };
        expect(std::string(failure.function) + " #" + std::to_string(failure.nth) + " fails on rank " +
                   std::to_string(victim) + (other_way ? ", another way is left" : ", no other way"),
               run_ranks({.ranks = 3, .before_threads = before}, body));
      }
}

void test_last_step_fails() {
  const auto body = [](Rank& rank) {
    const Topology topology = Topology::gather(rank.comm, 0, 0);
    if (rank.rank == 1) fake_fail("cuMemsetD8Async", 2, result::unknown);
    require_contains(error_of([&] { PeerMemory::create(rank.comm, topology, nbytes); }),
                     "rank 1: cuMemsetD8Async failed: error 999");
    rank.barrier();
    PeerMemory::free_parked();
  };
  expect("the last step fails", run_ranks({.ranks = 3, .before_threads = with(true, true)}, body));
}

void test_too_large() {
  const auto body = [](Rank& rank) {
    const Topology topology = Topology::gather(rank.comm, 0, 0);
    if (rank.rank == 2) fake_settings().memory_bytes = 1 << 20;
    require_contains(error_of([&] { PeerMemory::create(rank.comm, topology, nbytes); }),
                     "rank 2: cuMemAlloc failed: CUDA_ERROR_OUT");
    require_contains(error_of([&] { PeerMemory::create(rank.comm, topology, nbytes + rank.rank); }),
                     "nbytes=");
    require_contains(error_of([&] { PeerMemory::create(rank.comm, topology, nbytes, rank.rank == 1); }),
                     "multicast=");
    rank.barrier();
  };
  expect("out of memory, and different sizes",
         run_ranks({.ranks = 3, .before_threads = with(true, true)}, body));
}

// A mapping that succeeds but shows other memory is rejected on all ranks.
void test_wrong_mapping() {
  static Driver wrong;
  static DevicePtr other = 0;
  const auto body = [](Rank& rank) {
    const Topology topology = Topology::gather(rank.comm, 0, 0);
    if (rank.rank == 2) {
      other = allocate_block(0, 4096);
      zero_now(0, reinterpret_cast<void*>(other), 4096);
      wrong = *fake_driver();
      wrong.cuIpcOpenMemHandle = [](DevicePtr* address, IpcHandle, unsigned int) {
        *address = other;
        return static_cast<int>(result::success);
      };
      wrong.cuIpcCloseMemHandle = [](DevicePtr) { return static_cast<int>(result::success); };
      use_driver(&wrong);
    }
    require_contains(error_of([&] { PeerMemory::create(rank.comm, topology, nbytes); }),
                     "cuda_ipc: rank 2: the mapping of rank 0 shows other memory than that of the rank");
    if (rank.rank == 2) {
      use_driver(fake_driver());
      free_block(0, other, 4096);
    }
    rank.barrier();
  };
  expect("a wrong mapping", run_ranks({.ranks = 3, .before_threads = with(true, false)}, body));
}

// --- a rank that dies during creation

Driver deadly_driver;  // of the rank that dies

void test_death() {
  struct Death {
    const char* where;
    void (*plant)(Driver&);
    bool ipc;
  };
  const Death deaths[] = {
      {"cuMemAlloc", [](Driver& table) { table.cuMemAlloc = [](DevicePtr*, size_t) -> int { ::_exit(0); }; },
       true},
      {"cuIpcOpenMemHandle",
       [](Driver& table) {
         table.cuIpcOpenMemHandle = [](DevicePtr*, IpcHandle, unsigned) -> int { ::_exit(0); };
       },
       true},
      {"cuMemCreate",
       [](Driver& table) {
         table.cuMemCreate = [](MemHandle*, size_t, const MemAllocationProp*, unsigned long long) -> int {
           ::_exit(0);
         };
       },
       false},
      {"cuMemImportFromShareableHandle",
       [](Driver& table) {
         table.cuMemImportFromShareableHandle = [](MemHandle*, void*, int) -> int { ::_exit(0); };
       },
       false}};
  for (const Death& death : deaths)
    for (int victim : {0, 1}) {
      const auto body = [&](Rank& rank) {
        const Topology topology = Topology::gather(rank.comm, 0, 0);
        if (rank.rank == victim) {
          deadly_driver = *fake_driver();
          death.plant(deadly_driver);
          use_driver(&deadly_driver);
        }
        const auto begin = std::chrono::steady_clock::now();
        const std::string error = error_of([&] { PeerMemory::create(rank.comm, topology, nbytes); });
        require(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5), "the error comes soon");
        require_contains(error, "rank " + std::to_string(victim));
        const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
        while (PeerMemory::free_parked() && std::chrono::steady_clock::now() < limit)
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
      };
      expect(std::string("rank ") + std::to_string(victim) + " dies in " + death.where,
             run_ranks({.ranks = 3, .before_threads = with(death.ipc, !death.ipc), .may_die = victim}, body));
    }
}

// --- the end

// The others still read a rank's memory after its end.
void test_order_of_ends() {
  for (const Shape shape : {Shape{3, 1}, Shape{4, 2}, Shape{3, 3}})
    for (bool ipc : {true, false})
      for (int first : {0, 1, 2}) {
        const auto body = [&](Rank& rank) {
          Memory memory = make(rank);
          exercise(rank, *memory);
          rank.barrier();
          const bool near = rank.rank / shape.threads == first / shape.threads;
          if (rank.rank == first) memory.reset();
          rank.barrier();
          if (rank.rank == first)
            require((PeerMemory::free_parked() > 0) == (ipc || shape.threads > 1),
                    "memory is parked if peers have it: by IPC, or in the same process");
          else if (!near)
            require(memory->address(first)[1] == std::byte{value(0, first, 1)},
                    "memory of a rank that has ended");
          rank.barrier();
          drop(rank, memory);
        };
        expect(label("ends in any order", shape.ranks, shape.threads) + (ipc ? ", IPC" : ", VMM") +
                   ", first " + std::to_string(first),
               run_ranks({.ranks = shape.ranks, .threads = shape.threads, .before_threads = with(ipc, true)},
                         body));
      }
}

void test_end_without_communicator() {
  const auto body = [](Rank& rank) {
    Memory memory = make(rank), second = make(rank);
    rank.barrier();
    rank.comm.close();
    if (rank.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    second.reset();
    memory.reset();
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (PeerMemory::free_parked() && std::chrono::steady_clock::now() < limit)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  expect("ends after the communicator", run_ranks({.ranks = 3, .before_threads = with(true, true)}, body));
}

void test_dead_peer_at_the_end() {
  const auto body = [](Rank& rank) {
    Memory memory = make(rank);
    rank.barrier();
    if (rank.rank == 1) ::_exit(0);
    memory.reset();
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (PeerMemory::free_parked() && std::chrono::steady_clock::now() < limit)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  expect("a peer died before the end",
         run_ranks({.ranks = 3, .before_threads = with(true, true), .may_die = 1}, body));
}

void test_forked_child() {
  const auto body = [](Rank& rank) {
    Memory memory = make(rank);
    exercise(rank, *memory);
    const pid_t child = ::fork();
    if (child == 0) {
      memory.reset();
      ::_exit(fake_calls("cuMemFree") + fake_calls("cuIpcCloseMemHandle") + fake_calls("cuCtxSetCurrent"));
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    require(status == 0, "a forked child leaves the driver alone");
    rank.barrier();
    require(memory->address(1 - rank.rank)[0] == std::byte{value(0, 1 - rank.rank, 0)},
            "the parents' memory is as before");
    drop(rank, memory);
  };
  expect("a forked child", run_ranks({.ranks = 2, .before_threads = with(true, true)}, body));
}

// --- several devices

void test_devices() {
  for (const Shape shape : {Shape{2, 1}, Shape{2, 2}, Shape{4, 2}})
    for (bool ipc : {true, false})
      for (bool peer_access : {true, false}) {
        const auto body = [&](Rank& rank) {
          const int device = rank.rank % 2;
          if (peer_access) {
            Memory memory = make(rank, device);
            exercise(rank, *memory);
            return drop(rank, memory);
          }
          const std::string error = error_of([&] { make(rank, device); });
          if (shape.threads > 1) require_contains(error, "cannot address the memory of device");
          require_contains(error, "vmm_fd: rank 0: cuMemSetAccess failed");
          rank.barrier();
        };
        expect(label("two devices", shape.ranks, shape.threads) +
                   (peer_access ? "" : " without peer access") + (ipc ? "" : ", VMM"),
               run_ranks({.ranks = shape.ranks,
                          .threads = shape.threads,
                          .before_threads = with(ipc, true, 2, peer_access)},
                         body));
      }
}

void test_multicast() {
  constexpr const char* steps[] = {"", "cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem",
                                   "cuMulticastGetGranularity"};
  for (const Shape shape : {Shape{3, 1}, Shape{3, 3}, Shape{4, 2}})
    for (const std::string step : steps) {
      const auto body = [&](Rank& rank) {
        const Topology topology = Topology::gather(rank.comm, rank.rank, 0);
        if (rank.rank == 0 && !step.empty()) fake_fail(step, 1, result::not_permitted);
        Memory memory = PeerMemory::create(rank.comm, topology, nbytes, true);
        exercise(rank, *memory);
        require((memory->multicast() != nullptr) == step.empty(),
                "a multicast address in " + memory->describe());
        if (!step.empty()) require_contains(memory->describe(), step + " failed: error 800");
        if (step.empty()) {
          if (rank.rank == 1) memory->multicast()[7] = std::byte{99};
          rank.barrier();
          require(memory->multicast()[7] == std::byte{99}, "the ranks share the multicast object");
          rank.barrier();
        }
        drop(rank, memory);
      };
      expect(label("multicast", shape.ranks, shape.threads) + (step.empty() ? "" : ", failing in " + step),
             run_ranks({.ranks = shape.ranks,
                        .threads = shape.threads,
                        .before_threads = with(true, true, 4, true, true)},
                       body));
    }
  const auto body = [](Rank& rank) {
    Memory memory = make(rank, 0, true);
    require_contains(memory->describe(), "no multicast (ranks share a device)");
    exercise(rank, *memory);
    drop(rank, memory);
  };
  expect("no multicast on one device",
         run_ranks({.ranks = 2, .before_threads = with(true, true, 1, true, true)}, body));
}

}  // namespace

int main(int count, char** arguments) {
  return run_suites(count, arguments,
                    {{"ways", test_ways},
                     {"no way", test_no_way},
                     {"failures", test_failures},
                     {"last step", test_last_step_fails},
                     {"too large", test_too_large},
                     {"wrong mapping", test_wrong_mapping},
                     {"death", test_death},
                     {"order of ends", test_order_of_ends},
                     {"without communicator", test_end_without_communicator},
                     {"dead peer", test_dead_peer_at_the_end},
                     {"forked child", test_forked_child},
                     {"devices", test_devices},
                     {"multicast", test_multicast}});
}
