// fake_driver.h -- a CUDA driver without a GPU, for tests of the host code of csrc/cuda:
// use_driver(fake_driver()).
//
// What is real in it: memory that processes share (a memfd per block), streams (one thread each), events,
// waiting, calls that wait for all kernels (cuMemFree, cuMemFreeHost, cuMemHostUnregister), and the rules
// that a caller can break: no current context, an IPC handle opened by the process that made it, memory freed
// while another process has it mapped, a multicast object bound before all its devices are in. Kernels are
// functions given to fake_enqueue.
//
// A forked child starts with a driver of its own: the settings are kept, all objects are gone. The parent
// should have used no stream before, as with CUDA.
//
// Not modelled: what multimem instructions do with a multicast address (it is plain memory), graph capture
// beyond its status and the calls that end it, the order of unsynchronised host copies, the legacy stream's
// implicit synchronisation.
#pragma once

#include <functional>
#include <string>

#include "../../../csrc/cuda/device/driver.h"

namespace pycomm::cuda {

struct FakeSettings {
  int devices = 1;
  int first_device = 0;  // as CUDA_VISIBLE_DEVICES does: device 0 of this process is that one of the machine
  int multiprocessors = 16;
  int capability = 90;
  bool mps = false;
  bool stream_memory_operations = true;
  bool ipc = true;  // false: cuIpcOpenMemHandle fails
  bool vmm = true;  // false: no file descriptors of memory
  bool multicast = false;
  bool peer_access = true;  // between devices
  size_t memory_bytes = size_t{1} << 30;  // of each device
  int connections = 0;  // hardware queues, to which streams are dealt out; 0: each stream has its own
  bool negative_times = true;  // false: cuEventElapsedTime fails for an end before its begin
  double longest_wait = 10;  // seconds; a stream that waits longer goes on with an error
};

// What is alive in this process; all 0 when everything was given back.
struct FakeCounts {
  int allocations = 0;  // cuMemAlloc, cuMemHostAlloc
  int ipc_mappings = 0;
  int reservations = 0;  // of addresses
  int mappings = 0;  // of handles to addresses
  int handles = 0;
  int bindings = 0;  // of memory to multicast objects
  int registrations = 0;
  int streams = 0;
  int events = 0;

  int total() const {
    return allocations + ipc_mappings + reservations + mappings + handles + bindings + registrations +
           streams + events;
  }
  std::string describe() const;
};

const Driver* fake_driver();
FakeSettings& fake_settings();
FakeCounts fake_counts();
// Rules broken so far, one per line.
std::string fake_violations();
// The nth call of `function` in this process from now on (1: the next) returns `error` and does nothing.
void fake_fail(const std::string& function, int nth, int error);
int fake_calls(const std::string& function);
// Everything as new but for the settings; no stream may have work.
void fake_reset();

// What a kernel launch does: body runs when all earlier work of the stream is done.
void fake_enqueue(Stream stream, std::function<void()> body);
// cuMemFree without its wait: for what has been ordered behind all that uses the memory.
int fake_free(DevicePtr address);
// What cuStreamGetCaptureInfo tells of the stream from now on.
void fake_capture(Stream stream, int status, uint64_t id);

}  // namespace pycomm::cuda
