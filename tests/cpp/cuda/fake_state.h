// fake_state.h -- what the files of the fake driver share.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "fake_driver.h"

struct CUctx_st {
  int device = 0;
  std::set<int> peers;  // devices that it may address
};

namespace pycomm::cuda {

// Memory behind addresses: a file, which other processes open. A page behind the data says what it is and who
// has it mapped by IPC.
struct FakeFile {
  struct Tail {
    uint64_t magic;
    int32_t device;           // of the machine
    int32_t is_multicast;
    uint32_t num_devices;     // of a multicast object
    std::atomic<uint32_t> added;
    std::atomic<int32_t> users[512];  // pids
  };
  int fd = -1;
  size_t nbytes = 0;
  Tail* tail = nullptr;
  bool counted = false;       // in the memory of its device
  ~FakeFile();
};

struct FakeMapping {
  enum class Kind { allocated, host, ipc, reserved };
  Kind kind;
  size_t nbytes;
  std::shared_ptr<FakeFile> file;  // of `reserved`: what is mapped there, if anything
  int pid = 0, fd = -1;            // of ipc: the handle
  int opened = 1;                  // of ipc: how often
};

struct FakeStream;

struct FakeState {
  int pid;
  std::mutex mutex;
  std::map<DevicePtr, FakeMapping> mappings;
  std::map<MemHandle, std::shared_ptr<FakeFile>> handles;
  std::map<std::pair<MemHandle, int>, int> bindings;  // (multicast object, device)
  std::set<void*> registrations;
  std::map<int, size_t> used;  // bytes, by device of the machine
  std::vector<std::unique_ptr<CUctx_st>> contexts;
  std::map<std::string, int> calls;
  std::map<std::string, std::pair<int, int>> failures;  // (at which call, error)
  std::string violations;
  MemHandle next_handle = 0x100;
  std::shared_ptr<FakeStream> default_stream;
  std::map<int, std::vector<std::shared_ptr<FakeStream>>> queues;  // of the hardware, by device
  std::atomic<int> streams{0}, events{0};
  std::atomic<int> capturing{0};           // streams
  std::map<int, int> kernels;  // launched and not yet ended, by device
  std::condition_variable kernel_ended;
};

// Of this process; a forked child gets a new one.
FakeState& fake_state();
// Counts the call; not 0: the error that it must return.
int fake_enter(const char* function);
bool fake_has_context();
// Of calls that wait for the kernels of the device. Returns after longest_wait at the latest, and says so.
void fake_wait_for_kernels(const char* function);
int fake_current_device();  // of the context; with none: 0
bool fake_may_address(int device, int memory_device);
std::shared_ptr<FakeFile> fake_create_file(size_t nbytes, int device, bool is_multicast);
std::shared_ptr<FakeFile> fake_open_file(int fd);  // takes the descriptor
bool fake_take_memory(FakeState& state, FakeFile& file, int device);  // with the state locked
void fake_add_virtual_memory_functions(Driver& table);
void fake_add_stream_functions(Driver& table);

#define FAKE_ENTER(function) \
  if (int error = fake_enter(#function)) return error
#define FAKE_ENTER_IN_CONTEXT(function)                \
  if (int error = fake_enter(#function)) return error; \
  if (!fake_has_context()) return result::invalid_context

}  // namespace pycomm::cuda
