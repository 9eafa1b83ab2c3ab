// group_watch.cc -- what a group does while the device works: reads the error word, looks at its peers' lives, completes works. See
// group.h.
//
// The thread starts with the first operation. A tick costs a few loads and one query per line.
//
// A dead peer breaks the group after `grace`, in which operations that it had finished its part of still end. A peer that has closed the
// group in good order breaks it only if something does not end for `patience`: its part of what is under way may well be done.
#include <algorithm>
#include <cstring>

#include "device_memory.h"
#include "group.h"

namespace pycomm::cuda {

namespace {
constexpr std::chrono::milliseconds grace{50}, patience{500};
constexpr double host_margin = 10;  // seconds that the host waits longer than the device before it gives up itself
constexpr std::chrono::seconds longest_farewell{10};
using Clock = std::chrono::steady_clock;
}  // namespace

EventPool::~EventPool() {
  ContextGuard guard(device_);
  for (Event event : free_) require_driver().cuEventDestroy(event);
}

EventPtr EventPool::record(Stream stream) {
  Event event = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  const Driver& driver = require_driver();
  if (!event) PYCOMM_CUDA_CHECK(driver, cuEventCreate, &event, flag::event_disable_timing);
  EventPtr owned(event, [pool = shared_from_this()](Event e) {
    std::lock_guard lock(pool->mutex_);
    pool->free_.push_back(e);
  });
  PYCOMM_CUDA_CHECK(driver, cuEventRecord, event, stream);
  return owned;
}

// --- works -------------------------------------------------------------------------------------------------------------------------------

void CudaWork::end(std::exception_ptr error) {
  if (ended_.exchange(true)) return;
  keep_ = nullptr;
  settle(std::move(error));
}

void CudaWork::wait(double timeout) {
  if (done() && error()) std::rethrow_exception(error());
  if (timeout > 0 && !end_.capture.active) {
    group_.wait_for(*this, timeout);
    return;
  }
  {
    std::lock_guard lock(group_.mutex_);
    if (!end_.capture.active) group_.look_for_failure(info_);
  }
  order(current_ ? current_() : nullptr);
  if (end_.capture.active) end(nullptr);
}

void CudaWork::order(Stream stream) {
  ContextGuard guard(group_.device());
  const Capture capture = capture_of(stream);
  if (capture.active != end_.capture.active || capture.id != end_.capture.id)
    throw std::invalid_argument(
        group_.comm_.transport().where(info_) +
        "an operation must be waited for in the graph capture in which it was issued, or outside of any if it was issued outside.");
  std::lock_guard lock(group_.mutex_);
  group_.order_behind(stream, end_, capture);
}

bool CudaWork::poll() {
  if (done()) return true;
  if (end_.capture.active) return false;  // it will run when the graph is replayed
  std::exception_ptr error;
  {
    std::lock_guard lock(group_.mutex_);
    group_.read_records();
    if (!group_.reached(end_.event)) return false;
    if (group_.failure_ && group_.failed_.sequence == info_.sequence && group_.failed_.kind == info_.kind)
      error = std::exchange(group_.failure_, nullptr);
    group_.pending_.remove_if([this](const CudaWorkPtr& work) { return work.get() == this; });
  }
  end(error);
  return true;
}

// --- the thread --------------------------------------------------------------------------------------------------------------------------

void CudaGroup::start_watching() {
  if (!watcher_.joinable()) watcher_ = std::thread([this] { watch_loop(); });
  changed_.notify_one();
}

void CudaGroup::watch_loop() {
  std::unique_lock lock(mutex_);
  while (!stop_watching_) {
    look();
    const auto ended = take_ended();
    std::exception_ptr broken;
    if (comm_.transport().broken()) broken = failure_;
    lock.unlock();
    for (const CudaWorkPtr& work : ended) work->end(work->error() ? work->error() : broken);
    lock.lock();
    changed_.wait_for(lock, running() ? tick : idle_tick);
  }
}

std::vector<Mark> CudaGroup::last_marks() const {
  std::vector<Mark> marks;
  auto add = [&marks](const Line& line) {
    if (line.last.event && !line.last.capture.active) marks.push_back(line.last);
  };
  add(collectives_);
  for (const auto& [peer, line] : sending_) add(line);
  for (const auto& [peer, line] : receiving_) add(line);
  return marks;
}

// Or will never be: the driver says that a kernel or the device has failed, which ends the group.
bool CudaGroup::reached(const EventPtr& event) {
  ContextGuard guard(device_);
  const int result = driver_.cuEventQuery(event.get());
  if (result == result::not_ready) return false;
  if (result != result::success && !comm_.transport().broken())
    note_failure(ErrorKind::aborted, {}, comm_.rank(),
                 "the device of rank " + std::to_string(comm_.rank()) + " has failed: " + describe_result(result, "cuEventQuery"));
  return true;
}

bool CudaGroup::running() {
  for (const Mark& mark : last_marks())
    if (!reached(mark.event)) return true;
  return false;
}

void CudaGroup::look() {
  read_records();
  look_at_peers();
  look_at_deadline();
  if (comm_.transport().broken()) stop_device();
}

// Breaks the group for all ranks.
void CudaGroup::note_failure(ErrorKind kind, const OpInfo& info, int peer, const std::string& text) {
  try {
    comm_.transport().fail(kind, info, peer, text);
  } catch (const CommError&) {
    failure_ = std::current_exception();
    failed_ = info;
  }
}

void CudaGroup::read_records() {
  read_record(error_->records[0], OpKind::none);
  for (int p = 0; p < comm_.world_size(); ++p) {
    read_record(error_->records[record_of_sending(p)], OpKind::send);
    read_record(error_->records[record_of_receiving(p)], OpKind::recv);
  }
}

void CudaGroup::read_record(ErrorRecord& record, OpKind message) {
  const auto fault = static_cast<Fault>(__atomic_load_n(&record.fault, __ATOMIC_ACQUIRE));
  if (fault == Fault::none) return;
  const ErrorRecord seen = record;
  __atomic_store_n(&record.fault, 0, __ATOMIC_RELEASE);
  const Meta meta = Meta::unpack(seen.here.meta);
  const OpInfo info{message == OpKind::none ? meta.kind : message, seen.epoch};
  const int peer = static_cast<int>(seen.peer);
  if (fault == Fault::mismatch) {
    const bool told_elsewhere =
        seen.here.meta == seen.there.meta && seen.here.count == seen.there.count && seen.here.extra == seen.there.extra;
    const std::string text = told_elsewhere ? "rank " + std::to_string(peer) +
                                                  " found that its sizes differ from those of another rank. in_splits[dst] "
                                                  "of the sender must equal out_splits[src] of the receiver."
                                            : describe_difference(seen.here, seen.there, peer);
    if (protocol_.protocol == Protocol::stream_ordered) return note_failure(ErrorKind::mismatch, info, peer, text);
    try {
      comm_.transport().raise(ErrorKind::mismatch, info, peer, text);
    } catch (const CommError&) {
      if (failure_) return;
      failure_ = std::current_exception();
      failed_ = info;
    }
    return;
  }
  std::string missing;
  int count = 0;
  for (int p = 0; p < comm_.world_size(); ++p)
    if (seen.missing >> p & 1) missing += (count++ ? ", " : "") + std::to_string(p);
  std::ostringstream text;
  text << (count > 1 ? "ranks " : "rank ") << missing;
  if (fault == Fault::timeout) text << " did not arrive within the timeout";
  else text << ": what it had to send is not there, though stream memory operations say so (an error of pycomm or of the driver)";
  note_failure(fault == Fault::timeout ? ErrorKind::timeout : ErrorKind::aborted, info, peer, text.str());
}

void CudaGroup::look_at_peers() {
  Transport& transport = comm_.transport();
  if (transport.broken()) return;
  int dead = -1, closed = -1;
  for (int p = 0; p < comm_.world_size(); ++p) {
    if (p == comm_.rank()) continue;
    if (transport.peer_closed(p)) closed = p;
    else if (!transport.peer_alive(p)) dead = p;
  }
  if (dead < 0 && (closed < 0 || !running())) {
    gone_since_ = {};
    return;
  }
  const auto now = Clock::now();
  if (gone_since_ == Clock::time_point{}) gone_since_ = now;
  if (dead >= 0 && now - gone_since_ > grace)
    note_failure(ErrorKind::peer, {}, dead, "rank " + std::to_string(dead) + " died (its process ended)");
  else if (dead < 0 && now - gone_since_ > patience)
    note_failure(ErrorKind::peer, {}, closed, "rank " + std::to_string(closed) + " closed the group before it came to this operation");
}

// In stream order the device does not look at the clock. The busy word says that an operation of this rank has begun and not ended.
void CudaGroup::look_at_deadline() {
  if (protocol_.protocol != Protocol::stream_ordered || comm_.transport().broken()) return;
  const int n = comm_.world_size(), me = comm_.rank();
  const uint32_t busy = host_word(sync_words(n) + me)->load();
  if (!busy) {
    busy_since_ = {};
    return;
  }
  const auto now = Clock::now();
  if (busy_since_ == Clock::time_point{}) busy_since_ = now;
  if (std::chrono::duration<double>(now - busy_since_).count() < longest_timeout_) return;
  std::string missing;
  int first = -1, count = 0;
  for (int p = 0; p < n; ++p) {
    if (p == me || host_word(sync_word(n, 0, p, me))->load() || host_word(sync_word(n, 1, p, me))->load()) continue;
    if (first < 0) first = p;
    missing += (count++ ? ", " : "") + std::to_string(p);
  }
  std::ostringstream text;
  text << (count > 1 ? "ranks " : "rank ") << missing << " did not arrive within the timeout of " << longest_timeout_ << " s";
  note_failure(ErrorKind::timeout, {collectives_.issued ? OpKind::none : OpKind::send, 0}, first, text.str());
}

// Every wait of a kernel ends at `stop`, every wait of a stream at a 1 in its word.
void CudaGroup::stop_device() {
  __atomic_store_n(&error_->stop, 1, __ATOMIC_RELEASE);
  if (protocol_.protocol != Protocol::stream_ordered) return;
  const int n = comm_.world_size();
  for (int set = 0; set < 4; ++set)
    for (int p = 0; p < n; ++p) host_word(sync_word(n, set, p, comm_.rank()))->store(1);
}

std::vector<CudaWorkPtr> CudaGroup::take_ended() {
  std::vector<CudaWorkPtr> ended;
  for (auto it = pending_.begin(); it != pending_.end();) {
    const bool over = comm_.transport().broken() || reached((*it)->end_.event);
    if (over) ended.push_back(*it);
    it = over ? pending_.erase(it) : std::next(it);
  }
  return ended;
}

// --- errors, as the caller sees them -----------------------------------------------------------------------------------------------------

double CudaGroup::note_timeout(double timeout) {
  if (timeout <= 0) timeout = comm_.transport().timeout();
  longest_timeout_ = std::max(longest_timeout_, timeout);
  return timeout;
}

void CudaGroup::rethrow_failure() {
  if (failure_) std::rethrow_exception(comm_.transport().broken() ? failure_ : std::exchange(failure_, nullptr));
}

void CudaGroup::look_for_failure(const OpInfo& info) {
  read_records();
  rethrow_failure();
  comm_.transport().check(info);
}

void CudaGroup::wait_for(CudaWork& work, double timeout) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(std::min(timeout + host_margin, 1e8));
  for (int round = 0;; ++round) {
    {
      std::lock_guard lock(mutex_);
      if (reached(work.end_.event)) {
        look_for_failure(work.info());
        break;
      }
      if (comm_.transport().broken()) {
        stop_device();
        look_for_failure(work.info());
      }
      if (Clock::now() > deadline)
        note_failure(ErrorKind::timeout, work.info(), -1,
                     "the device did not finish within the timeout of " + std::to_string(timeout) + " s"),
            rethrow_failure();
    }
    if (round < 200) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  work.end(nullptr);
}

// --- the end -----------------------------------------------------------------------------------------------------------------------------

void CudaGroup::close() {
  {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    if (!error_) return;  // set_up() failed
    // What is under way ends by itself, or because its peers are gone; not for ever.
    const auto limit = Clock::now() + longest_farewell;
    for (const Mark& mark : last_marks())
      while (!reached(mark.event) && Clock::now() < limit) {
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        lock.lock();
      }
    stop_watching_ = true;
    changed_.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
  ContextGuard guard(device_);
  stop_device();
  for (const CudaWorkPtr& work : std::exchange(pending_, {})) work->end(failure_);
  auto end_line = [this](Line& line) {
    if (line.own) driver_.cuStreamDestroy(line.own);
    line = {};
  };
  end_line(collectives_);
  for (auto& [peer, line] : sending_) end_line(line);
  for (auto& [peer, line] : receiving_) end_line(line);
  events_.reset();
  arena_.reset();
  if (region_table_) driver_.cuMemFree(region_table_);
  if (host_words_on_device_) driver_.cuMemHostUnregister(host_words_.segment->data());
  driver_.cuMemFreeHost(error_);
  host_words_ = {};
}

std::vector<std::pair<std::string, std::string>> CudaGroup::describe() const {
  std::ostringstream seconds;
  seconds << setup_seconds_;
  return {{"device", "cuda:" + std::to_string(device_)},
          {"topology", topology_.describe()},
          {"protocol", protocol_.protocol == Protocol::resident ? "resident" : "stream_ordered"},
          {"protocol_reason", protocol_.reason},
          {"blocks", std::to_string(protocol_.blocks)},
          {"peer_access", arena_ ? arena_->describe() : "closed"},
          {"buffers", shape_.pointers ? "any, by pointer" : "registered ones in place, others through staging"},
          {"staging_bytes", std::to_string(2 * shape_.group.half_bytes)},
          {"arena_bytes", arena_ ? std::to_string(arena_->nbytes()) : "0"},
          {"setup_seconds", seconds.str()}};
}

}  // namespace pycomm::cuda
