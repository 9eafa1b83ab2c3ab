// device_times.cc -- see device_times.h.
#include "device_times.h"

#include <chrono>
#include <thread>

namespace pycomm::cuda {

namespace {
constexpr size_t most_pending = 4096;
constexpr uint64_t second = 1'000'000'000, at_once = 500'000;  // nanoseconds
// Of a second: 64 ends seen at once, of which the best is some microseconds late, or so many looks in vain.
constexpr int enough = 1024, of_an_end = 16;
constexpr int tries = 100;  // of a millisecond, for the lock at the end of a trace
}  // namespace

DeviceTimes::DeviceTimes(const Setup& setup, GroupLock& lock) : setup_(setup), lock_(lock) {
  trace::add(*this);
}

DeviceTimes::~DeviceTimes() { trace::remove(*this); }

EventPtr DeviceTimes::mark(Stream stream) {
  if (count_ >= most_pending) return nullptr;
  if (!clock_) clock_ = DeviceClock::of(setup_.device);
  return clock_->record(stream);
}

void DeviceTimes::expect(Stream stream, Pending operation) {
  pending_[stream].push_back(std::move(operation));
  ++count_;
}

bool DeviceTimes::wanted_soon() const { return count_ > 0 && closely_ < enough; }

void DeviceTimes::look() {
  if (!clock_) return;
  if (!trace::Recorder::instance().active()) return forget();
  const uint64_t now = trace::now_ns();
  if (now - second_ns_ > second) {
    second_ns_ = now;
    closely_ = 0;
  }
  const bool closely = now - looked_ns_ < at_once;
  looked_ns_ = now;
  if (!count_) return;
  closely_ += closely;
  try {
    RelaxedCapture relaxed;
    ContextGuard guard(setup_.device);
    for (auto it = pending_.begin(); it != pending_.end();) {
      look_at(it->second, closely);
      it = it->second.empty() ? pending_.erase(it) : std::next(it);
    }
  } catch (const std::exception&) {
    forget();  // the driver is at its end
  }
}

// In a stream operations end one after the other.
void DeviceTimes::look_at(std::deque<Pending>& queue, bool closely) {
  while (!queue.empty() && take(queue.front())) {
    queue.pop_front();
    --count_;
    closely_ += closely ? of_an_end : 0;
  }
}

bool DeviceTimes::take(Pending& operation) {
  const int result = setup_.driver.cuEventQuery(operation.end.get());
  if (result == result::not_ready) return false;
  if (result != result::success) return true;  // the device has failed, which others find out
  trace::Times& times = operation.times;
  if (times.generation != trace::Recorder::instance().generation()) return true;  // of a trace before
  times.begun = trace::now_ns();
  const auto found = clock_->read(operation.begin, operation.end, times.issued, times.generation);
  if (!found) return true;
  times.arrived = found->begin;
  times.waited = found->end;
  times.last = found->number;
  trace::Recorder::instance().ended(times, operation.subject, setup_.comm.traced_as(), false);
  return true;
}

void DeviceTimes::forget() {
  pending_.clear();
  count_ = 0;
  clock_.reset();
}

void DeviceTimes::close() {
  look();
  forget();
}

// Who holds the lock may be blocked by the driver, so it is not waited for long.
void DeviceTimes::late() {
  for (int i = 0; i < tries; ++i) {
    if (const auto held = lock_.try_take()) return look();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// --- one call

TracedCall::TracedCall(Communicator& comm, DeviceTimes& device, const trace::Subject& subject)
    : comm_(comm), device_(device), subject_(subject) {
  if (!trace::measuring()) return;
  times_.issued = trace::now_ns();
  trace::Recorder::instance().issued(times_, subject_, comm_.traced_as());
}

TracedCall::~TracedCall() {
  if (times_.measured() && !done_) record(true);
}

void TracedCall::record(bool failed) {
  times_.ended = trace::now_ns();
  trace::Recorder::instance().ended(times_, subject_, comm_.traced_as(), failed);
}

void TracedCall::begins(Stream stream, const Capture& capture) {
  if (!times_.ticket || capture.active) return;  // no trace; in a graph it runs at each replay
  stream_ = stream;
  begin_ = device_.mark(stream);
}

void TracedCall::ends(Stream stream) {
  if (begin_) end_ = device_.mark(stream);
}

void TracedCall::done() {
  done_ = true;
  if (subject_.kind != OpKind::none) comm_.device_counters().count_shared(subject_.kind, subject_.nbytes);
  if (!times_.measured()) return;
  record(false);
  if (end_) device_.expect(stream_, {std::move(begin_), std::move(end_), times_, subject_});
}

}  // namespace pycomm::cuda
