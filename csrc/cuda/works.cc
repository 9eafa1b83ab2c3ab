// works.cc -- see works.h.
#include "works.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "../transport/interrupt.h"

namespace pycomm::cuda {

namespace {
// Seconds that the host waits longer than the device before it gives up itself.
constexpr double host_margin = 10;
}  // namespace

// --- one work

void CudaWork::complete(std::exception_ptr error) {
  if (completed_.exchange(true)) return;
  keep_ = nullptr;
  settle(std::move(error));
}

void CudaWork::wait(double timeout) {
  if (done() && error()) works_.rethrow(*this);
  if (timeout > 0 && !captured()) return works_.wait_for_end(*this, timeout);
  works_.look_for_fault(*this);
  order(current_ ? current_() : nullptr);
  if (captured()) complete(nullptr);
}

Device CudaWork::device() const { return works_.device(); }

void CudaWork::order(Stream stream) { works_.order(*this, stream); }

bool CudaWork::poll() { return done() || (!captured() && works_.poll(*this)); }

// --- what the handles ask for

void Works::rethrow(const CudaWork& work) {
  const auto held = lock_.take(work.info());
  faults_.forget(work.error());  // thrown here, and nowhere else
  std::rethrow_exception(work.error());
}

void Works::look_for_fault(const CudaWork& work) {
  const auto held = lock_.take(work.info());
  if (!work.captured()) faults_.look(work.info());
}

void Works::order(const CudaWork& work, Stream stream) {
  ContextGuard guard(setup_.device);
  const Capture capture = capture_of(stream), &issued = work.end().capture;
  if (capture.active != issued.active || capture.id != issued.id)
    throw std::invalid_argument(setup_.comm.transport().where(work.info()) +
                                "an operation must be waited for in the graph capture in which it was "
                                "issued, or outside of any if it was issued outside.");
  const auto held = lock_.take(work.info());
  order_behind(stream, work.end(), capture);
}

bool Works::poll(CudaWork& work) {
  std::exception_ptr error;
  {
    RelaxedCapture relaxed;
    const auto held = lock_.take(work.info());
    if (!faults_.reached(work.end().event)) return false;
    faults_.read();
    error = faults_.take_of(work.info());
    pending_.remove_if([&work](const CudaWorkPtr& each) { return each.get() == &work; });
  }
  work.complete(error);
  return work.done();  // the watching thread may be at it
}

void Works::wait_for_end(CudaWork& work, double timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(std::min(timeout + host_margin, 1e8));
  for (int round = 0;; ++round) {
    {
      RelaxedCapture relaxed;
      const auto held = lock_.take(work.info());
      if (faults_.reached(work.end().event)) {
        faults_.look(work.info());
        break;
      }
      if (faults_.broken()) {
        words_.stop_device();
        faults_.look(work.info());
      }
      if (Clock::now() > deadline) {
        faults_.note(ErrorKind::timeout, work.info(), -1,
                     "the device did not finish within the timeout of " + std::to_string(timeout) + " s");
        faults_.rethrow();
      }
    }
    if (interrupted()) setup_.comm.transport().abort(interrupted_text);  // without the lock: it runs handlers
    if (round < 200) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  work.complete(nullptr);
}

// --- what the watching thread and the end of the group ask for

std::vector<Works::Ended> Works::take_ended() {
  std::vector<Ended> ended;
  for (auto it = pending_.begin(); it != pending_.end();) {
    // Also when the group is broken: until then the device may use the buffers.
    const bool over = faults_.reached((*it)->end().event);
    if (over) ended.push_back({*it, nullptr});
    it = over ? pending_.erase(it) : std::next(it);
  }
  faults_.read();
  for (auto& [work, error] : ended) error = faults_.of(work->info());
  return ended;
}

std::vector<Works::Ended> Works::take_all() {
  std::vector<Ended> all = take_ended();
  for (const CudaWorkPtr& work : std::exchange(pending_, {})) {
    const std::string text = setup_.comm.transport().where(work->info()) + "the communicator is closed";
    all.push_back({work, std::make_exception_ptr(CommError(ErrorKind::aborted, text, setup_.rank(),
                                                           setup_.world_size(), work->info(), -1))});
  }
  return all;
}

}  // namespace pycomm::cuda
