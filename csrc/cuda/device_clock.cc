// device_clock.cc -- see device_clock.h.
#include "device_clock.h"

#include <atomic>
#include <cmath>
#include <map>

#include "../trace/record.h"
#include "../transport/transport.h"

namespace pycomm::cuda {

namespace {

constexpr int64_t second = 1'000'000'000;
constexpr int64_t longest_gap = 16 * second;  // a float of milliseconds is exact to 1 us up to here

// Clocks begun in this process. A trace has room for so many numbers; those of one that is 65,534 clocks
// older lie hours apart.
std::atomic<uint32_t> clocks_begun{0};

// Nanoseconds from the one to the other; nothing: the driver does not say.
std::optional<int64_t> asked(const EventPtr& from, const EventPtr& to) {
  float ms = 0;
  if (require_driver().cuEventElapsedTime(&ms, from.get(), to.get()) != result::success) return std::nullopt;
  if (!std::isfinite(ms) || std::fabs(ms) > 1e12f) return std::nullopt;
  return std::llround(static_cast<double>(ms) * 1e6);
}

// [Note: elapsed times backwards]
std::optional<int64_t> elapsed(const EventPtr& from, const EventPtr& to) {
  const auto forward = asked(from, to);
  if (forward && *forward > 0) return forward;
  const auto backward = asked(to, from);
  if (backward && *backward >= 0) return -*backward;
  return std::nullopt;
}

}  // namespace

std::shared_ptr<DeviceClock> DeviceClock::of(Device device) {
  static std::mutex mutex;
  static auto& clocks = *new std::map<std::pair<uint64_t, Device>, std::weak_ptr<DeviceClock>>;
  std::lock_guard lock(mutex);
  auto& known = clocks[{fork_generation(), device}];  // the parent's events are not ours
  std::shared_ptr<DeviceClock> clock = known.lock();
  if (!clock) known = clock = std::make_shared<DeviceClock>(device);
  return clock;
}

DeviceClock::DeviceClock(Device device) : events_(std::make_shared<EventPool>(device, true)) {}

void DeviceClock::restart(const EventPtr& at, uint64_t before_ns, uint32_t generation) {
  base_ = at;
  base_ns_ = static_cast<int64_t>(before_ns);
  number_ = static_cast<uint16_t>(clocks_begun.fetch_add(1, std::memory_order_relaxed) % trace::nobody);
  generation_ = generation;
}

std::optional<DeviceClock::Interval> DeviceClock::read(const EventPtr& begin, const EventPtr& end,
                                                       uint64_t before_ns, uint32_t generation) {
  const auto length = elapsed(begin, end);
  if (!length || *length < 0) return std::nullopt;
  std::lock_guard lock(mutex_);
  if (!base_ || generation != generation_) restart(begin, before_ns, generation);
  auto since = base_ == begin ? std::optional<int64_t>(0) : elapsed(base_, begin);
  if (!since || *since > longest_gap) {
    restart(begin, before_ns, generation);
    since = 0;
  }
  const int64_t begins = base_ns_ + *since, ends = begins + *length;
  if (begins <= 0) return std::nullopt;  // from before the machine started
  const Interval found{static_cast<uint64_t>(begins), static_cast<uint64_t>(ends), number_};
  if (ends - base_ns_ > second) {
    base_ = end;
    base_ns_ = ends;
  }
  return found;
}

}  // namespace pycomm::cuda
