// fake_streams.cc -- streams and events of the fake driver: a stream is a queue and a thread that runs it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "fake_state.h"

struct CUstream_st {
  std::shared_ptr<pycomm::cuda::FakeStream> stream;
  bool owned;  // false: a hardware queue, which others share
};

namespace pycomm::cuda {

// What an event holds since it was recorded.
struct FakeRecord {
  std::atomic<bool> reached{false};
  int64_t at_ns = 0;  // since it was reached, by the host's clock
};

}  // namespace pycomm::cuda

struct CUevent_st {
  const bool timed;
  std::mutex mutex;
  std::shared_ptr<pycomm::cuda::FakeRecord> last;  // none: never recorded
};

namespace pycomm::cuda {

struct FakeStream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  uint64_t submitted = 0, completed = 0;
  bool ending = false;
  std::atomic<int> error{0};
  int capture_status = flag::capture_none;
  uint64_t capture_id = 0;

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return ending || !work.empty(); });
      if (work.empty()) return;
      std::function<void()> body = std::move(work.front());
      work.pop_front();
      lock.unlock();
      body();
      body = nullptr;
      lock.lock();
      ++completed;
      changed.notify_all();
    }
  }
};

namespace {

// The thread holds the stream as long as there is work; nobody joins it.
std::shared_ptr<FakeStream> start_stream() {
  auto stream = std::make_shared<FakeStream>();
  std::thread([stream] { stream->run(); }).detach();
  return stream;
}

std::shared_ptr<FakeStream> stream_of(Stream handle) {
  if (handle) return handle->stream;
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  if (!state.default_stream) state.default_stream = start_stream();
  return state.default_stream;
}

void submit(FakeStream& stream, std::function<void()> body) {
  std::lock_guard lock(stream.mutex);
  stream.work.push_back(std::move(body));
  ++stream.submitted;
  stream.changed.notify_all();
}

// In a stream's thread. Nobody waits for ever in a test.
template <class Ready>
void wait_until(FakeStream& stream, const Ready& ready, const char* what) {
  const auto limit =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(fake_settings().longest_wait);
  for (int spins = 0; !ready(); ++spins) {
    if (std::chrono::steady_clock::now() > limit) {
      std::fprintf(stderr, "fake driver: a stream gave up after %g s: %s\n", fake_settings().longest_wait,
                   what);
      stream.error = result::launch_timeout;
      return;
    }
    if (spins < 200) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// The queue with the fewest streams. All that is in one runs in order of submission: a device may do better,
// but need not.
std::shared_ptr<FakeStream> hardware_queue() {
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  auto& queues = state.queues[fake_current_device()];
  while (static_cast<int>(queues.size()) < fake_settings().connections) queues.push_back(start_stream());
  return *std::min_element(queues.begin(), queues.end(),
                           [](const auto& a, const auto& b) { return a.use_count() < b.use_count(); });
}

int cuStreamCreateWithPriority(Stream* stream, unsigned int, int) {
  FAKE_ENTER_IN_CONTEXT(cuStreamCreateWithPriority);
  const bool owned = fake_settings().connections == 0;
  *stream = new CUstream_st{owned ? start_stream() : hardware_queue(), owned};
  ++fake_state().streams;
  return result::success;
}

int cuStreamDestroy(Stream stream) {
  FAKE_ENTER(cuStreamDestroy);
  if (stream->owned) {
    std::lock_guard lock(stream->stream->mutex);
    stream->stream->ending = true;
    stream->stream->changed.notify_all();
  }
  delete stream;
  --fake_state().streams;
  return result::success;
}

int cuStreamSynchronize(Stream handle) {
  // Returned late: the work must not outlive the memory that it uses.
  const int failure = fake_enter("cuStreamSynchronize");
  if (!fake_has_context()) return result::invalid_context;
  const auto stream = stream_of(handle);
  std::unique_lock lock(stream->mutex);
  const uint64_t last = stream->submitted;
  stream->changed.wait(lock, [&] { return stream->completed >= last; });
  return failure ? failure : stream->error.load();
}

int cuStreamQuery(Stream handle) {
  FAKE_ENTER_IN_CONTEXT(cuStreamQuery);
  const auto stream = stream_of(handle);
  std::lock_guard lock(stream->mutex);
  if (stream->error) return stream->error;
  return stream->completed == stream->submitted ? result::success : result::not_ready;
}

// signature of cuda.h
int cuStreamGetCaptureInfo(Stream handle, int* status, uint64_t* id, CUgraph_st**, CUgraphNode_st* const**,
                           const CUgraphEdgeData_st**, size_t*) {
  FAKE_ENTER(cuStreamGetCaptureInfo);
  const auto stream = stream_of(handle);
  std::lock_guard lock(stream->mutex);
  *status = stream->capture_status;
  if (id) *id = stream->capture_id;
  return result::success;
}

int cuMemsetD8Async(DevicePtr address, unsigned char value, size_t nbytes, Stream stream) {
  FAKE_ENTER_IN_CONTEXT(cuMemsetD8Async);
  fake_enqueue(stream, [=] { std::memset(reinterpret_cast<void*>(address), value, nbytes); });
  return result::success;
}

int cuMemcpyAsync(DevicePtr to, DevicePtr from, size_t nbytes, Stream stream) {
  FAKE_ENTER_IN_CONTEXT(cuMemcpyAsync);
  fake_enqueue(stream, [=] {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes);
  });
  return result::success;
}

void write_word(Stream stream, const BatchMemOp& write) {
  fake_enqueue(stream, [=] {
    std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(write.address))
        .store(static_cast<uint32_t>(write.value), std::memory_order_release);
  });
}

void wait_for_word(Stream handle, const BatchMemOp& wait) {
  FakeStream* const stream = stream_of(handle).get();  // lives as long as its work
  fake_enqueue(handle, [=] {
    auto ready = [=] {
      const uint32_t now = std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(wait.address))
                               .load(std::memory_order_acquire);
      const auto value = static_cast<uint32_t>(wait.value);
      return wait.flags == flag::wait_geq  ? static_cast<int32_t>(now - value) >= 0
             : wait.flags == flag::wait_eq ? now == value
                                           : (now & value) != 0;
    };
    wait_until(*stream, ready, "a wait for a word");
  });
}

int cuStreamBatchMemOp(Stream stream, unsigned int count, BatchMemOp* operations, unsigned int flags) {
  FAKE_ENTER_IN_CONTEXT(cuStreamBatchMemOp);
  if (!fake_settings().stream_memory_operations) return result::not_supported;
  if (!count || count > flag::batch_most || flags) return result::invalid_value;
  for (unsigned int i = 0; i < count; ++i) {
    const BatchMemOp& each = operations[i];
    const bool waits = each.operation == flag::batch_wait;
    if (each.address % 4 || (!waits && each.operation != flag::batch_write) ||
        each.flags > (waits ? flag::wait_and : flag::write_default))
      return result::invalid_value;
  }
  for (unsigned int i = 0; i < count; ++i)
    operations[i].operation == flag::batch_wait ? wait_for_word(stream, operations[i])
                                                : write_word(stream, operations[i]);
  return result::success;
}

thread_local int capture_mode = 0;  // global

int cuThreadExchangeStreamCaptureMode(int* mode) {
  FAKE_ENTER(cuThreadExchangeStreamCaptureMode);
  std::swap(*mode, capture_mode);
  return result::success;
}

// While a stream of the process is captured as torch.cuda.graph does it (global mode), such a call of any
// thread that has not said otherwise for itself ends the capture.
void refuse_in_capture(const char* call) {
  FakeState& state = fake_state();
  if (!state.capturing || capture_mode == flag::capture_mode_relaxed) return;
  std::lock_guard lock(state.mutex);
  std::fprintf(stderr, "fake driver: %s ends a capture of another thread\n", call);
  state.violations += std::string(call) + " ends a capture of another thread\n";
}

// --- events ---

int cuEventCreate(Event* event, unsigned int flags) {
  FAKE_ENTER_IN_CONTEXT(cuEventCreate);
  *event = new CUevent_st{!(flags & flag::event_disable_timing), {}, {}};
  ++fake_state().events;
  return result::success;
}

int cuEventDestroy(Event event) {
  FAKE_ENTER(cuEventDestroy);
  delete event;
  --fake_state().events;
  return result::success;
}

std::shared_ptr<FakeRecord> last_record(Event event) {
  std::lock_guard lock(event->mutex);
  return event->last;
}

bool is_reached(const FakeRecord& record) { return record.reached.load(std::memory_order_acquire); }

int cuEventRecord(Event event, Stream stream) {
  FAKE_ENTER_IN_CONTEXT(cuEventRecord);
  auto record = std::make_shared<FakeRecord>();
  {
    std::lock_guard lock(event->mutex);
    event->last = record;
  }
  fake_enqueue(stream, [record] {
    record->at_ns = std::chrono::steady_clock::now().time_since_epoch().count();
    record->reached.store(true, std::memory_order_release);
  });
  return result::success;
}

int cuEventQuery(Event event) {
  FAKE_ENTER(cuEventQuery);
  refuse_in_capture("cuEventQuery");
  const auto record = last_record(event);
  return !record || is_reached(*record) ? result::success : result::not_ready;
}

int cuEventElapsedTime(float* ms, Event begin, Event end) {
  FAKE_ENTER(cuEventElapsedTime);
  refuse_in_capture("cuEventElapsedTime");
  const auto from = last_record(begin), to = last_record(end);
  if (!from || !to || !begin->timed || !end->timed) return result::invalid_handle;
  if (!is_reached(*from) || !is_reached(*to)) return result::not_ready;
  const int64_t nanoseconds = to->at_ns - from->at_ns;
  if (nanoseconds < 0 && !fake_settings().negative_times) return result::invalid_value;
  *ms = static_cast<float>(nanoseconds) / 1e6f;
  return result::success;
}

int cuEventSynchronize(Event event) {
  FAKE_ENTER(cuEventSynchronize);
  const auto record = last_record(event);
  while (record && !is_reached(*record)) std::this_thread::sleep_for(std::chrono::microseconds(20));
  return result::success;
}

int cuStreamWaitEvent(Stream handle, Event event, unsigned int) {
  FAKE_ENTER_IN_CONTEXT(cuStreamWaitEvent);
  const auto record = last_record(event);
  FakeStream* const stream = stream_of(handle).get();
  if (record)
    fake_enqueue(handle,
                 [=] { wait_until(*stream, [&] { return is_reached(*record); }, "cuStreamWaitEvent"); });
  return result::success;
}

}  // namespace

void fake_enqueue(Stream stream, std::function<void()> body) { submit(*stream_of(stream), std::move(body)); }

void fake_capture(Stream handle, int status, uint64_t id) {
  const auto stream = stream_of(handle);
  std::lock_guard lock(stream->mutex);
  fake_state().capturing +=
      (status == flag::capture_active) - (stream->capture_status == flag::capture_active);
  stream->capture_status = status;
  stream->capture_id = id;
}

void fake_add_stream_functions(Driver& table) {
#define FAKE_ADD(name) table.name = name
  FAKE_ADD(cuStreamCreateWithPriority);
  FAKE_ADD(cuStreamDestroy);
  FAKE_ADD(cuStreamSynchronize);
  FAKE_ADD(cuStreamQuery);
  FAKE_ADD(cuStreamGetCaptureInfo);
  FAKE_ADD(cuMemsetD8Async);
  FAKE_ADD(cuMemcpyAsync);
  FAKE_ADD(cuStreamBatchMemOp);
  FAKE_ADD(cuThreadExchangeStreamCaptureMode);
  FAKE_ADD(cuEventCreate);
  FAKE_ADD(cuEventDestroy);
  FAKE_ADD(cuEventRecord);
  FAKE_ADD(cuEventQuery);
  FAKE_ADD(cuEventSynchronize);
  FAKE_ADD(cuEventElapsedTime);
  FAKE_ADD(cuStreamWaitEvent);
#undef FAKE_ADD
}

}  // namespace pycomm::cuda
