// group_watch.cc -- what a group does while the device works: reads the error word, looks at its peers' lives, completes works. See
// group.h.
//
// The thread starts with the first operation. A tick costs a few loads and one query per line.
//
// A dead peer breaks the group after `grace`, in which operations that it had finished its part of still end. A peer that has closed the
// group in good order breaks it only if something does not end for `patience`: its part of what is under way may well be done.
#include <algorithm>
#include <bit>
#include <cstring>

#include "device_memory.h"
#include "group.h"

namespace pycomm::cuda {

namespace {
constexpr std::chrono::milliseconds grace{50}, patience{500};
constexpr double host_margin = 10;  // seconds that the host waits longer than the device before it gives up itself
constexpr std::chrono::seconds longest_farewell{10};
using Clock = std::chrono::steady_clock;

// "rank 2", "ranks 1, 3"
std::string names_of(uint32_t ranks) {
  std::string text = std::popcount(ranks) > 1 ? "ranks " : "rank ";
  for (uint32_t rest = ranks; rest; rest &= rest - 1) text += (rest == ranks ? "" : ", ") + std::to_string(std::countr_zero(rest));
  return text;
}
}  // namespace

EventPool::~EventPool() {
  if (forked()) return;
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
  EventPtr owned(event, [pool = shared_from_this()](Event e) { pool->take_back(e); });
  PYCOMM_CUDA_CHECK(driver, cuEventRecord, event, stream);
  return owned;
}

void EventPool::take_back(Event event) {
  if (forked()) return;
  std::lock_guard lock(mutex_);
  free_.push_back(event);
}

// --- works -------------------------------------------------------------------------------------------------------------------------------

void CudaWork::end(std::exception_ptr error) {
  if (ended_.exchange(true)) return;
  keep_ = nullptr;
  settle(std::move(error));
}

void CudaWork::wait(double timeout) {
  if (done() && error()) {
    const auto lock = group_.enter_group(info_);
    if (group_.failure_ == error() && !group_.comm_.transport().broken()) group_.failure_ = nullptr;  // thrown here, and nowhere else
    std::rethrow_exception(error());
  }
  if (timeout > 0 && !end_.capture.active) {
    group_.wait_for(*this, timeout);
    return;
  }
  {
    const auto lock = group_.enter_group(info_);
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
  const auto lock = group_.enter_group(info_);
  group_.order_behind(stream, end_, capture);
}

bool CudaWork::poll() {
  if (done()) return true;
  if (end_.capture.active) return false;  // it will run when the graph is replayed
  std::exception_ptr error;
  {
    const auto lock = group_.enter_group(info_);
    if (!group_.reached(end_.event)) return false;
    group_.read_records();
    error = group_.error_of(info_);
    if (error && !group_.comm_.transport().broken()) group_.failure_ = nullptr;
    group_.pending_.remove_if([this](const CudaWorkPtr& work) { return work.get() == this; });
  }
  end(error);
  return done();  // the watching thread may be at it
}

// --- the thread --------------------------------------------------------------------------------------------------------------------------

std::unique_lock<std::mutex> CudaGroup::enter_group(const OpInfo& info) const {
  if (comm_.transport().forked()) comm_.transport().check(info);
  return std::unique_lock(mutex_);
}

void CudaGroup::start_watching() {
  if (!watcher_.joinable()) watcher_ = std::thread([this] { watch_loop(); });
  if (watcher_idle_) changed_.notify_one();
}

// In the capture mode that torch.cuda.graph uses, a query of an event by any thread would end every capture of the process, unless that
// thread has said otherwise for itself.
void CudaGroup::watch_loop() {
  int mode = flag::capture_mode_relaxed;
  driver_.cuThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock lock(mutex_);
  while (!stop_watching_) {
    look();
    auto ended = take_ended();
    lock.unlock();
    for (auto& [work, error] : ended) work->end(error);
    ended.clear();
    lock.lock();
    if (stop_watching_) return;
    watcher_idle_ = !running();
    changed_.wait_for(lock, watcher_idle_ ? idle_tick : tick);
    watcher_idle_ = false;
  }
}

std::vector<const CudaGroup::Line*> CudaGroup::lines() const {
  std::vector<const Line*> all{&collectives_};
  for (const auto& [peer, line] : sending_) all.push_back(&line);
  for (const auto& [peer, line] : receiving_) all.push_back(&line);
  return all;
}

std::vector<Mark> CudaGroup::last_marks() const {
  std::vector<Mark> marks;
  for (const Line* line : lines())
    if (line->eager.event) marks.push_back(line->eager);
  return marks;
}

// Until all that was issued outside of captures so far has ended. False: it has not, within `limit`.
bool CudaGroup::drain(std::unique_lock<std::mutex>& lock, Clock::duration limit, bool stop) {
  const auto late = Clock::now() + limit;
  for (const Mark& mark : last_marks())
    while (!reached(mark.event)) {
      if (Clock::now() > late) return false;
      if (stop) stop_device();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      lock.lock();
    }
  return true;
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
  look_at_deadlines();
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
  const std::string missing = names_of(static_cast<uint32_t>(seen.missing));
  if (fault == Fault::timeout) return note_failure(ErrorKind::timeout, info, peer, missing + " did not arrive within the timeout");
  note_failure(
      ErrorKind::aborted, info, peer,
      missing + ": what it had to send is not there, though stream memory operations say so (an error of pycomm or of the driver)");
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

void CudaGroup::look_at_deadlines() {
  if (protocol_.protocol != Protocol::stream_ordered || comm_.transport().broken()) return;
  const auto now = Clock::now();
  look_at_deadline(collectives_, now);
  for (auto& [peer, line] : sending_) look_at_deadline(line, now);
  for (auto& [peer, line] : receiving_) look_at_deadline(line, now);
}

// In stream order the device does not look at the clock. The host looks at the words at times; a line that is at work may have gone round
// in between, and a replayed graph writes the same busy word each time, so a line is late only if nothing of it was ever seen to change.
void CudaGroup::look_at_deadline(Line& line, Clock::time_point now) {
  const int n = comm_.world_size(), me = comm_.rank(), message = line.number - 1;
  const uint32_t busy = host_word(busy_word(line))->load();
  uint32_t arrived = 0, wanted = 0;
  auto look_at = [&](int set, int p) { arrived |= static_cast<uint32_t>(host_word(sync_word(n, set, p, me))->load() != 0) << p; };
  for (int p = 0; p < n; ++p) {
    if (line.number == 0 ? p == me : p != message % n) continue;
    wanted |= 1u << p;
    if (line.number == 0) look_at(0, p), look_at(1, p);
    else look_at(message < n ? set_of_receivers : set_of_senders, p);
  }
  if (!busy && line.eager.event && reached(line.eager.event)) line.timeouts.clear();
  if (!busy || busy != line.busy || arrived != line.arrived) {
    line.busy = busy;
    line.arrived = arrived;
    line.since = now;
    return;
  }
  const double timeout = timeout_of(line, busy);
  if (std::chrono::duration<double>(now - line.since).count() < timeout) return;
  std::ostringstream text;
  if (wanted & ~arrived) text << names_of(wanted & ~arrived) << " did not arrive within the timeout of " << timeout << " s";
  else text << "the device of rank " << me << " did not finish within the timeout of " << timeout << " s";
  const OpInfo info{static_cast<OpKind>(busy & ((1u << busy_kind_bits) - 1)), busy >> busy_kind_bits};
  note_failure(ErrorKind::timeout, info, wanted & ~arrived ? std::countr_zero(wanted & ~arrived) : me, text.str());
}

// Of the operation that the busy word names; of a replayed one it is not known.
double CudaGroup::timeout_of(Line& line, uint32_t busy) const {
  const auto is_it = [busy](const auto& entry) { return entry.first == busy; };
  const auto found = std::find_if(line.timeouts.begin(), line.timeouts.end(), is_it);
  if (found == line.timeouts.end()) return longest_timeout_;
  line.timeouts.erase(line.timeouts.begin(), found);
  return line.timeouts.front().second;
}

// Every wait of a kernel ends at `stop`, every wait of a stream at a 1 in its word.
void CudaGroup::stop_device() {
  __atomic_store_n(&error_->stop, 1, __ATOMIC_RELEASE);
  if (protocol_.protocol != Protocol::stream_ordered) return;
  const int n = comm_.world_size();
  for (int set = 0; set < 4; ++set)
    for (int p = 0; p < n; ++p) host_word(sync_word(n, set, p, comm_.rank()))->store(1);
}

std::vector<CudaGroup::Ended> CudaGroup::take_ended() {
  std::vector<Ended> ended;
  for (auto it = pending_.begin(); it != pending_.end();) {
    const bool over = reached((*it)->end_.event);  // also when the group is broken: until then the device may use the buffers
    if (over) ended.push_back({*it, nullptr});
    it = over ? pending_.erase(it) : std::next(it);
  }
  read_records();
  for (auto& [work, error] : ended) error = error_of(work->info());
  return ended;
}

std::exception_ptr CudaGroup::error_of(const OpInfo& info) const {
  if (failure_ && (comm_.transport().broken() || (failed_.sequence == info.sequence && failed_.kind == info.kind))) return failure_;
  try {
    if (comm_.transport().broken()) comm_.transport().check(info);
  } catch (const CommError&) {
    return std::current_exception();
  }
  return nullptr;
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
  if (closed_) comm_.transport().raise(ErrorKind::aborted, info, -1, "the communicator is closed");
  read_records();
  rethrow_failure();
  comm_.transport().check(info);
}

void CudaGroup::wait_for(CudaWork& work, double timeout) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(std::min(timeout + host_margin, 1e8));
  for (int round = 0;; ++round) {
    {
      const auto lock = enter_group(work.info());
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
  if (comm_.transport().forked()) return;
  bool drained = false;
  {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    if (!error_) return;  // set_up() failed
    // What is under way ends by itself, or because its peers are gone.
    drained = drain(lock, longest_farewell);
    stop_watching_ = true;
    changed_.notify_all();
  }
  const bool in_callback = watcher_.get_id() == std::this_thread::get_id();  // of a work; then the destructor joins
  if (watcher_.joinable() && !in_callback) watcher_.join();
  std::vector<Ended> ended;
  {
    std::unique_lock lock(mutex_);
    if (!drained) drained = drain(lock, longest_farewell, true);
    ended = take_all();
  }
  for (auto& [work, error] : ended) work->end(error);
  if (drained) {
    give_back();
  } else {  // the device does not even stop, so it keeps what it may use
    (void)arena_.release();
    (void)new std::vector<Region>(std::move(regions_));
  }
}

std::vector<CudaGroup::Ended> CudaGroup::take_all() {
  std::vector<Ended> all = take_ended();
  for (const CudaWorkPtr& work : std::exchange(pending_, {}))
    all.push_back(
        {work, std::make_exception_ptr(CommError(ErrorKind::aborted, comm_.transport().where(work->info()) + "the communicator is closed",
                                                 comm_.rank(), comm_.world_size(), work->info(), -1))});
  return all;
}

void CudaGroup::give_back() {
  ContextGuard guard(device_);
  for (const Line* line : lines())
    if (line->own) driver_.cuStreamDestroy(line->own);
  collectives_ = {};
  sending_.clear();
  receiving_.clear();
  events_.reset();
  regions_.clear();
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
