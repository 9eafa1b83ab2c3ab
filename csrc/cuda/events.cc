// events.cc -- see events.h.
#include "events.h"

#include <stdexcept>

#include "../transport/transport.h"

namespace pycomm::cuda {

EventPool::EventPool(Device device, bool timed)
    : device_(device), timed_(timed), fork_generation_(fork_generation()) {}

EventPool::~EventPool() {
  if (forked()) return;
  ContextGuard guard(device_);
  for (Event event : free_) require_driver().cuEventDestroy(event);
}

bool EventPool::forked() const { return fork_generation_ != fork_generation(); }

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
  if (!event)
    PYCOMM_CUDA_CHECK(driver, cuEventCreate, &event,
                      timed_ ? flag::event_default : flag::event_disable_timing);
  EventPtr owned(event, [pool = shared_from_this()](Event e) { pool->take_back(e); });
  PYCOMM_CUDA_CHECK(driver, cuEventRecord, event, stream);
  return owned;
}

EventPtr EventPool::record_if_possible(Stream stream) {
  try {
    return record(stream);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void EventPool::take_back(Event event) {
  if (forked()) return;
  std::lock_guard lock(mutex_);
  free_.push_back(event);
}

void order_behind(Stream stream, const Mark& mark, const Capture& capture) {
  if (mark.capture.active != capture.active || (capture.active && mark.capture.id != capture.id)) return;
  PYCOMM_CUDA_CHECK(require_driver(), cuStreamWaitEvent, stream, mark.event.get(), 0);
}

}  // namespace pycomm::cuda
