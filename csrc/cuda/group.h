// group.h -- the CUDA side of a communicator: what it owns on the device, and how operations get into streams.
//
// Made by the first operation on device memory, which all ranks of the group must therefore issue together: places are compared, a protocol
// is chosen (topology.h), arenas are allocated and mapped (peer_memory.h). From then on the host never waits: an operation is planned
// (plan.h), enqueued and left to the device. Only barrier blocks.
//
// [Note: lines] Operations that use the same flags must run one after the other, on every rank in the same order. There is one line for
// collectives and one for each end of each message channel. An operation that enters another stream than the one before it in its line
// waits for it there by an event; so a group may be used from several streams, and the order of issue is the order of execution.
// Asynchronous operations go to a stream of the line. While a stream is being captured, events of other captures and of eager work cannot
// be waited for; then the order is the caller's business, as with any captured work. So a line remembers the last of either.
//
// [Note: how errors come back] Kernels write what went wrong into the error word in host memory and end. A watching thread reads it,
// together with the life of the peers; it stops the device's waits when the group is broken. The next call on the group, or on a work of
// it, throws. A mismatch is thrown once and the group goes on, unless it runs in stream order; everything else breaks the group, on all
// ranks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <sstream>

#include "../collectives/registered.h"
#include "../communicator.h"
#include "peer_memory.h"
#include "plan.h"
#include "sync_words.h"

namespace pycomm::cuda {

inline constexpr std::chrono::milliseconds tick{5};  // of the watching thread while something runs
inline constexpr std::chrono::milliseconds idle_tick{50};

// In stream order a word says which operation of a line is under way: its sequence number and kind, 0 for none.
inline constexpr int busy_kind_bits = 4;

class CudaGroup;

// Events to be used again. An event may be recorded anew while a stream still waits for what it meant before (a wait takes what the event
// holds when it is enqueued), so it is free as soon as nobody will name it again.
using EventPtr = std::shared_ptr<CUevent_st>;
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(Device device) : device_(device), fork_generation_(fork_generation()) {}
  ~EventPool();
  EventPtr record(Stream stream);

 private:
  void take_back(Event event);
  bool forked() const { return fork_generation_ != fork_generation(); }  // events are the parent's

  const Device device_;
  const uint64_t fork_generation_;
  std::mutex mutex_;
  std::vector<Event> free_;
};

// Where a line has come to.
struct Mark {
  EventPtr event;
  Stream stream = nullptr;
  Capture capture{};
};

// The handle of an operation on the device.
class CudaWork final : public Work {
 public:
  // `current` says which stream wait() is to order; `keep` owns what the operation uses.
  CudaWork(CudaGroup& group, OpInfo info, std::function<Stream()> current, Mark end, std::function<void()> keep)
      : group_(group), info_(info), current_(std::move(current)), end_(std::move(end)), keep_(std::move(keep)) {}

  // Orders the current stream behind the operation; with a timeout (seconds) blocks the host until it has ended. Throws what is known of
  // errors.
  void wait(double timeout = 0) override;
  bool poll() override;
  void help(bool) override {}  // the watching thread completes it
  // Orders any stream behind the operation.
  void order(Stream stream);
  const OpInfo& info() const { return info_; }
  Stream stream() const { return end_.stream; }

 private:
  friend class CudaGroup;
  void end(std::exception_ptr error);

  CudaGroup& group_;
  const OpInfo info_;
  const std::function<Stream()> current_;
  const Mark end_;
  std::function<void()> keep_;
  std::atomic<bool> ended_{false};
};

using CudaWorkPtr = std::shared_ptr<CudaWork>;

// What the front ends say about a call.
struct Issue {
  Stream stream = nullptr;  // the caller's current stream
  bool async_op = false;  // on a stream of the group; the caller's is not held up until wait()
  bool watched = false;  // the work completes by itself, as an asynchronous one does, also in the caller's stream
  double timeout = 0;  // seconds, 0: the group's
  std::function<Stream()> current;  // asked by wait()
  std::function<void()> keep;  // owns the buffers; let go when the operation has ended
  std::function<void(Stream)> after;  // enqueues what belongs to the operation behind it, in its stream
};

class CudaGroup final : public DeviceEngine {
 public:
  // The group's engine for `device`. Collective where it is made. Throws.
  static CudaGroup& of(Communicator& comm, Device device);
  ~CudaGroup() override;

  CudaWorkPtr issue(const Op& op, const Issue& issue);
  CudaWorkPtr issue(const MessageCall& message, const Issue& issue);
  // Blocks until all ranks have come and what is in this stream is done. Throws.
  void barrier(const Issue& issue);

  // Registered memory; collective.
  struct Registered {
    std::shared_ptr<PeerMemory> memory;
    std::byte* data;
  };
  Registered allocate(size_t nbytes);
  void release(const Registered& registered);  // waits for what was issued before
  // What `peer` has at this place of registered memory; nullptr for other memory.
  std::byte* at_peer(const void* data, size_t nbytes, int peer);

  void close() override;
  bool on_own_thread() const override { return watcher_.get_id() == std::this_thread::get_id(); }
  Device device() const { return device_; }
  std::vector<std::pair<std::string, std::string>> describe() const;

 private:
  friend class CudaWork;
  struct Line {
    int number = 0;  // of its busy word
    Mark eager{}, captured{};  // the last outside of captures, and in the newest one
    Stream own = nullptr;  // of asynchronous operations
    uint64_t issued = 0;
    // What was last seen in stream order: the busy word, which peers have come, and since when both are so.
    uint32_t busy = 0, arrived = 0;
    std::chrono::steady_clock::time_point since{};
    std::deque<std::pair<uint32_t, double>> timeouts{};  // seconds, by busy word, of what has not ended outside of captures
  };
  struct Ended {
    CudaWorkPtr work;
    std::exception_ptr error;
  };
  struct Region {
    std::shared_ptr<PeerMemory> memory;
    std::byte* base = nullptr;
    size_t nbytes = 0;
    bool dropped = false;  // by this rank
  };

  CudaGroup(Communicator& comm, Device device);
  void set_up();
  void compare_settings();
  size_t free_region();
  void make_host_words();
  Shape make_shape() const;
  size_t staging_bytes() const;
  size_t host_bytes() const;
  std::atomic<uint32_t>* host_word(size_t index) const;
  size_t busy_word(const Line& line) const;
  std::atomic<uint64_t>* stream_in_use(int rank) const;
  Registry registry();
  const Region* find_region(const void* data, size_t nbytes, size_t* id) const;

  template <class Make>
  Plan plan_or_explain(const OpInfo& info, const Make& make) const;
  Line& line_of(const MessageCall& message);
  CudaWorkPtr enqueue(Line& line, const Plan& steps, OpInfo info, const Issue& issue, const MessageCall* message = nullptr);
  Stream enter(Line& line, const Issue& issue, const Capture& capture);
  void refuse_shared_stream(const OpInfo& info, Stream stream);
  void run_steps(const Plan& steps, Stream stream, size_t busy, uint32_t busy_value, const MessageCall* message);
  void apply(const std::vector<WordOperation>& operations, Stream stream);
  void order_behind(Stream stream, const Mark& mark, const Capture& capture);
  bool reached(const EventPtr& event);

  // --- group_watch.cc; with mutex_ held unless said ---
  std::unique_lock<std::mutex> enter_group(
      const OpInfo& info) const;  // takes it; throws in a forked child, where it may be locked for ever
  std::vector<const Line*> lines() const;
  std::vector<Mark> last_marks() const;
  bool drain(std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::duration limit, bool stop = false);
  void start_watching();
  void watch_loop();  // without
  void look();
  bool running();  // has anything that was issued not ended?
  void read_records();
  void read_record(ErrorRecord& record, OpKind message);
  void look_at_peers();
  void look_at_deadlines();
  void look_at_deadline(Line& line, std::chrono::steady_clock::time_point now);
  double timeout_of(Line& line, uint32_t busy) const;
  void stop_device();
  std::vector<Ended> take_ended();
  std::exception_ptr error_of(const OpInfo& info) const;  // what an operation that has ended did wrong
  std::vector<Ended> take_all();
  void give_back();
  void note_failure(ErrorKind kind, const OpInfo& info, int peer, const std::string& text);
  void look_for_failure(const OpInfo& info);  // throws what went wrong since the last look
  void rethrow_failure();
  void wait_for(CudaWork& work, double timeout);  // without
  double note_timeout(double timeout);

  Communicator& comm_;
  const Device device_;
  const Driver& driver_;
  Topology topology_;
  ProtocolChoice protocol_{};
  Shape shape_;
  std::unique_ptr<PeerMemory> arena_;
  ErrorWord* error_ = nullptr;  // host memory
  DevicePtr region_table_ = 0;
  RegisteredBuffer host_words_{};
  DevicePtr host_words_on_device_ = 0;
  uint64_t syncs_ = 0;
  double setup_seconds_ = 0;
  std::shared_ptr<EventPool> events_;

  // On the heap, because a forked child must leave it alone.
  struct Threading {
    std::mutex mutex;
    std::condition_variable changed;
    std::thread watcher;
  };
  std::unique_ptr<Threading> threading_ = std::make_unique<Threading>();
  std::mutex& mutex_ = threading_->mutex;  // of the order of issue, and of all below
  std::condition_variable& changed_ = threading_->changed;
  std::thread& watcher_ = threading_->watcher;
  Line collectives_;
  std::map<int, Line> sending_, receiving_;
  std::vector<Region> regions_;
  std::list<CudaWorkPtr> pending_;
  std::exception_ptr failure_;
  OpInfo failed_{};  // which operation failure_ belongs to
  double longest_timeout_ = 0;
  std::chrono::steady_clock::time_point gone_since_{};
  bool closed_ = false, stop_watching_ = false, watcher_idle_ = false;
};

}  // namespace pycomm::cuda
