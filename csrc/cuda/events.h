// events.h -- how far a stream has come, as events of the driver.
//
// EventPool has a lock of its own, inside which nothing else is taken: an event may be let go on any thread.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/driver.h"

namespace pycomm::cuda {

using EventPtr = std::shared_ptr<CUevent_st>;

// Events to be used again. An event may be recorded anew while a stream still waits for what it meant before
// (a wait takes what the event holds when it is enqueued), so it is free as soon as nobody refers to it.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(Device device, bool timed = false);  // timed: they keep when they happened
  ~EventPool();
  EventPtr record(Stream stream);
  EventPtr record_if_possible(Stream stream);  // nullptr instead of an exception

 private:
  void take_back(Event event);
  bool forked() const;  // in a forked child the events belong to the parent

  const Device device_;
  const bool timed_;
  const uint64_t fork_generation_;
  std::mutex mutex_;
  std::vector<Event> free_;
};

// A place in a stream.
struct Mark {
  EventPtr event;
  Stream stream = nullptr;
  Capture capture{};
};

// What enters `stream` from now on runs after `mark`. An event recorded in one graph capture, or in none,
// means nothing in another: then nothing is done.
void order_behind(Stream stream, const Mark& mark, const Capture& capture);

}  // namespace pycomm::cuda
