// watch.cc -- see watch.h.
#include "watch.h"

namespace pycomm::cuda {

namespace {
constexpr std::chrono::milliseconds tick{5};  // while something runs
constexpr std::chrono::milliseconds idle_tick{50};
constexpr std::chrono::microseconds soon{200};  // for a trace
constexpr std::chrono::milliseconds grace{50}, patience{500};
}  // namespace

Watcher::~Watcher() {
  if (state_.setup.comm.transport().forked()) (void)thread_.release();  // it runs in the parent
  else if (thread_ && thread_->joinable()) thread_->join();
}

void Watcher::start() {
  if (!thread_) thread_ = std::make_unique<std::thread>([this] { run(); });
  if (idle_) state_.lock.wake();
}

void Watcher::stop() {
  stopping_ = true;
  state_.lock.wake();
}

void Watcher::join() {
  if (thread_ && thread_->joinable() && !on_own_thread()) thread_->join();
}

void Watcher::run() {
  RelaxedCapture relaxed;
  auto held = state_.lock.take_here();
  while (!stopping_) {
    look();
    auto ended = state_.works.take_ended();
    held.unlock();
    for (auto& each : ended) each.complete();
    ended.clear();
    held.lock();
    if (stopping_) return;
    idle_ = !running() && !state_.times.pending();
    rest(held);
    idle_ = false;
  }
}

void Watcher::rest(std::unique_lock<std::mutex>& held) {
  const auto until = Clock::now() + (idle_ ? idle_tick : tick);
  while (state_.times.wanted_soon() && !stopping_) {
    state_.lock.sleep(held, soon);
    state_.times.look();
    if (Clock::now() >= until) return;
  }
  const auto left = std::chrono::duration_cast<std::chrono::microseconds>(until - Clock::now());
  if (!stopping_ && left.count() > 0) state_.lock.sleep(held, left);
}

void Watcher::look() {
  state_.times.look();
  state_.faults.read();
  look_at_peers();
  state_.deadlines.look();
  if (state_.faults.broken()) state_.words.stop_device();
}

void Watcher::look_at_peers() {
  const Transport& transport = state_.setup.comm.transport();
  if (transport.broken()) return;
  int dead = -1, closed = -1;
  for (int p = 0; p < state_.setup.world_size(); ++p) {
    if (p == state_.setup.rank()) continue;
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
    state_.faults.note(ErrorKind::peer, {}, dead,
                       "rank " + std::to_string(dead) + " died (its process ended)");
  else if (dead < 0 && now - gone_since_ > patience)
    state_.faults.note(
        ErrorKind::peer, {}, closed,
        "rank " + std::to_string(closed) + " closed the group before it came to this operation");
}

bool Watcher::running() {
  for (const Mark& mark : state_.lines.last_marks())
    if (!state_.faults.reached(mark.event)) return true;
  return false;
}

bool Watcher::drain(std::unique_lock<std::mutex>& held, Clock::duration limit, bool stop_device) {
  const auto late = Clock::now() + limit;
  RelaxedCapture relaxed;
  for (const Mark& mark : state_.lines.last_marks())
    while (!state_.faults.reached(mark.event)) {
      if (Clock::now() > late) return false;
      if (stop_device) state_.words.stop_device();
      held.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      held.lock();
    }
  return true;
}

}  // namespace pycomm::cuda
