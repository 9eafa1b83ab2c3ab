// communicator.cc -- see communicator.h.
#include "communicator.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>

#include "../op/validate.h"
#include "../transport/interrupt.h"

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int spins_before_sleep = 50;  // the worker that runs the operation may need this very core
constexpr auto poll_look_every = std::chrono::milliseconds(10);
constexpr auto longest_farewell = std::chrono::seconds(1);
constexpr auto nap = std::chrono::microseconds(500);  // of the worker, see worker_loop()
constexpr int naps_before_sleep = 2;
constexpr double busy_tick = 0.02, idle_tick = 0.05;  // seconds that the worker sleeps at most
constexpr auto interrupt_tick = std::chrono::milliseconds(50);

// The ranks of one memory, by their processes; FNV-1a.
uint64_t members_of(const Transport& transport) {
  uint64_t sum = 0xcbf29ce484222325;
  for (int p = 0; p < transport.world_size(); ++p)
    sum = (sum ^ transport.control(p).process_token) * 0x100000001b3;
  return sum >> 11;  // fits a double, as some readers of JSON have it
}

thread_local int waits_with_progress = 0;  // in which this thread runs BackgroundProgress

}  // namespace

Communicator::Communicator(std::shared_ptr<Transport> transport, RunOp run_op, int rank, int world_size)
    : transport_(std::move(transport)), run_op_(run_op), rank_(rank), world_size_(world_size) {
  const Whole& whole = transport_->whole();
  const bool part = !whole.ranks.empty() && world_size_ == transport_->world_size();
  traced_as_.name = transport_->name();
  traced_as_.rank = part ? transport_->number(rank_) : rank_;
  traced_as_.world_size = world_size_;
  traced_as_.host = part ? whole.host : "";
  if (world_size_ == transport_->world_size()) traced_as_.members = members_of(*transport_);
}

Communicator::Communicator(std::shared_ptr<Transport> transport, RunOp run_op)
    : Communicator(transport, run_op, transport->rank(), transport->world_size()) {}

Communicator::~Communicator() {
  if (transport_->forked()) {
    (void)threading_.release();
    return;
  }
  close();
  end_worker();  // where a callback on the worker thread had closed it; see release_communicator
  background_.reset();  // before the hosts' side, which its messages may need
}

// The last reference may go in a callback that the worker, or a thread of the device side, runs: it cannot
// wait for its own end.
void release_communicator(Communicator* comm) {
  if (comm->on_own_thread()) std::thread([comm] { delete comm; }).detach();
  else delete comm;
}

void Communicator::attach(std::unique_ptr<BackgroundProgress> progress) {
  background_ = std::move(progress);
  transport_->set_idle_hook([this] {
    ++waits_with_progress;
    if (background_) background_->progress();
    --waits_with_progress;
  });
}

bool Communicator::progress_inside_a_wait() { return waits_with_progress > 0; }

void Communicator::attach(std::unique_ptr<DeviceSide> side) { device_side_ = std::move(side); }

void Communicator::attach(std::unique_ptr<HostsSide> side) { hosts_side_ = std::move(side); }

void Communicator::raise(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) const {
  throw CommError(kind, transport_->where(op) + text, rank_, world_size_, op, peer);
}

void Task::wait(double timeout) { comm_.wait(*this, timeout); }
bool Task::poll() { return comm_.poll(*this); }
void Task::help(bool) { comm_.help(*this); }

void Communicator::settle(Task& task, std::exception_ptr error) {
  if (task.times_.measured()) end_measuring(task, error != nullptr);
  auto keep = std::move(task.self_);  // the last reference may go with the queue's
  task.settle(std::move(error));
}

void Communicator::begin_measuring(Task& task, bool blocks) {
  task.times_.issued = trace::now_ns();
  if (blocks) task.times_.waited = task.times_.issued;
  trace::Recorder::instance().issued(task.times_, task.subject(), traced_as_);
}

void Communicator::end_measuring(Task& task, bool failed) {
  trace::Times times = task.times_.at_end();
  const trace::Subject subject = task.subject();
  if (!failed) counters_.measure(subject.kind, subject.nbytes, times);
  trace::Recorder::instance().ended(times, subject, traced_as_, failed);
}

// Before any lock: in a forked child the copied mutex may be locked, and `busy_` may speak of a thread of the
// parent.
void Communicator::refuse_forked() const {
  if (transport_->forked()) transport_->check({});
}

// A signal handler runs inside the wait of the main thread, which would now wait for itself. With the lock
// held.
void Communicator::refuse_nested() const {
  if (runs_here())
    throw std::runtime_error(transport_->where({}) +
                             "an operation was called inside another of the same group, in whose wait this "
                             "thread runs a signal handler: neither could end. Use another group there, or "
                             "let the handler only take a note.");
}

void Communicator::run(Task& task) {
  refuse_forked();
  {
    std::unique_lock lock(mutex_);
    if (busy_ || !queue_.empty()) {
      refuse_nested();
      task.sequence_ = next_sequence_++;
      if (trace::measuring()) begin_measuring(task, true);
      queue_.push_back(&task);
      lock.unlock();
      wait(task);
      return;
    }
    busy_ = true;
    runner_ = std::this_thread::get_id();
    task.sequence_ = next_sequence_++;
  }
  if (trace::measuring()) begin_measuring(task, true);
  std::exception_ptr error;
  try {
    task.publish();
    task.finish(false);
  } catch (...) {
    error = std::current_exception();
  }
  if (task.times_.measured()) end_measuring(task, error != nullptr);
  {
    std::lock_guard lock(mutex_);
    busy_ = false;
    if (!queue_.empty() || stop_) wake_all();
  }
  if (error) std::rethrow_exception(error);
}

void Communicator::issue(std::shared_ptr<Task> shared) {
  refuse_forked();
  Task& task = *shared;
  std::unique_lock lock(mutex_);
  if (!busy_ && !queue_.empty() && queue_.front()->published_ && queue_.front()->ready())
    execute_head(lock, false);
  task.sequence_ = next_sequence_++;
  task.self_ = std::move(shared);
  if (trace::measuring()) begin_measuring(task, false);
  if (stop_) {  // another thread has closed the group since this call began: nobody runs the queue any more
    lock.unlock();
    settle(task, closed_error());
    return;
  }
  bool alone = !busy_ && queue_.empty();
  queue_.push_back(&task);
  if (alone && task.small()) {
    try {
      task.publish();
      task.published_ = true;
    } catch (...) {
      queue_.pop_back();
      lock.unlock();
      settle(task, std::current_exception());
    }
    return;
  }
  help_wanted_ = true;
  start_worker();  // without one, whoever waits runs it
  lock.unlock();
  wake_all();
}

// Called with the lock held and busy_ false; returns with the lock held.
void Communicator::execute_head(std::unique_lock<std::mutex>& lock, bool patient) {
  Task& task = *queue_.front();
  busy_ = true;
  runner_ = std::this_thread::get_id();
  lock.unlock();
  std::exception_ptr error;
  try {
    if (!task.published_) task.publish();
    task.published_ = true;
    task.finish(patient);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  queue_.pop_front();
  busy_ = false;
  if (queue_.empty()) help_wanted_ = false;
  lock.unlock();
  // A task on a caller's stack may be gone after this, and no reference to the error is left here: whoever
  // waits is the last to have it.
  settle(task, std::move(error));
  lock.lock();
  wake_all();
}

void Communicator::wait(Task& task, double timeout) {
  refuse_forked();
  if (task.times_.measured() && !task.done()) task.times_.wait_begins();
  for (int i = 0; i < spins_before_sleep && !transport_->oversubscribed(); ++i) {
    if (task.done()) break;
    if ((i & 15) == 0) {
      std::unique_lock lock(mutex_, std::try_to_lock);
      if (lock && !busy_ && !queue_.empty()) break;
    }
    cpu_relax();
  }
  std::unique_lock lock(mutex_);
  const auto limit = std::chrono::steady_clock::now() +
                     std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                         std::chrono::duration<double>(timeout > 0 ? std::min(timeout, 1e8) : 1e8));
  bool called_away = false;
  std::exception_ptr late;
  while (!task.done()) {
    if (!busy_ && !queue_.empty()) {
      // What stands before this task is run within this waiter's limit, too.
      if (timeout > 0) {
        Task& head = *queue_.front();
        head.wait_timeout_ = timeout;
        head.wait_deadline_ = limit;
        head.wait_is_own_ = &head == &task;
      }
      execute_head(lock, false);
      continue;
    }
    refuse_nested();
    const auto next_look = Clock::now() + interrupt_tick;
    changed_.wait_until(lock, late ? next_look : std::min(limit, next_look));
    if (task.done()) break;
    lock.unlock();
    if (!called_away && interrupted()) {
      // Whoever runs the head sees it and ends; so does the rest of the queue, up to this task, which may lie
      // on the stack of the caller.
      called_away = true;
      transport_->abort(interrupted_text);
    }
    lock.lock();
    if (task.done() || timeout <= 0 || late || Clock::now() < limit) continue;
    // Somebody else runs the head, and it takes too long for this waiter: say who is missing, as its own
    // deadline would. The group is broken by it: a task that runs ends soon, and its buffers are the caller's
    // then; one that has not begun will not begin.
    try {
      if (!queue_.empty() && queue_.front()->published_) queue_.front()->look(timeout);
      transport_->fail(ErrorKind::timeout, {}, -1,
                       "operation #" + std::to_string(task.sequence()) + " did not complete within " +
                           std::to_string(timeout) + " s");
    } catch (const CommError&) {
      if (queue_.empty() || queue_.front() != &task) throw;
      late = std::current_exception();
    }
  }
  lock.unlock();
  if (late) std::rethrow_exception(late);
  if (task.error()) std::rethrow_exception(task.error());
  if (called_away) transport_->check({});
}

bool Communicator::poll(Task& task) {
  if (task.done()) return true;
  refuse_forked();
  std::unique_lock lock(mutex_);
  while (!task.done() && !busy_ && !queue_.empty() && queue_.front()->published_ && queue_.front()->ready())
    execute_head(lock, false);
  if (!task.done()) look_at_head(lock);
  return task.done();
}

// Who only polls learns of a dead peer, too.
void Communicator::look_at_head(std::unique_lock<std::mutex>& lock) {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look_ || busy_ || queue_.empty() || !queue_.front()->published_) return;
  next_look_ = now + poll_look_every;
  Task& head = *queue_.front();
  std::exception_ptr error;
  try {
    head.look(0);
    return;
  } catch (...) {
    error = std::current_exception();
  }
  queue_.pop_front();
  lock.unlock();
  settle(head, std::move(error));
  lock.lock();
  wake_all();
}

void Communicator::help(Task& task) {
  if (task.done()) return;
  refuse_forked();
  lend_worker(true);
  {
    std::lock_guard lock(mutex_);
    help_wanted_ = true;
  }
  wake_all();
}

// Who sleeps until the queue changes: callers in wait(), and the worker.
void Communicator::wake_all() {
  changed_.notify_all();
  if (has_worker_.load(std::memory_order_relaxed)) transport_->ring_helper(transport_->rank());
}

void Communicator::help_queue() {
  refuse_forked();
  {
    std::lock_guard lock(mutex_);
    if (queue_.empty()) return;
    help_wanted_ = true;
    start_worker();
  }
  wake_all();
}

void Communicator::lend_worker(bool nobody_waits) {
  if (has_worker_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(mutex_);
  if (!start_worker() && nobody_waits && !stop_)
    throw std::runtime_error(
        transport_->where({}) +
        "the system refuses another thread, and nobody waits for this operation. Wait for "
        "it, or raise the limit of threads (ulimit -u, pids.max of the container).");
}

bool Communicator::start_worker() {
  if (stop_) return false;  // first: from then on another thread joins it
  if (worker_.joinable()) return true;
  try {
    worker_ = std::thread([this] { worker_loop(); });
  } catch (const std::system_error&) {
    return false;
  }
  ::pthread_setname_np(worker_.native_handle(), "pycomm-worker");
  has_worker_.store(true);
  return true;
}

// [Note: the worker naps first] Most asynchronous operations are waited for at once, by a caller who needs no
// help; a worker that begins at the bell takes the core, or the operation, from that caller. So it naps
// before it takes an operation, and after the last it goes on napping for a while before it sleeps at the
// bell again: as long as it naps, whoever has work for it need not even ring. A nap is long beside what is
// waited for at once, since its end disturbs the core it happens on, and short beside what is worth running
// beside a computation.
void Communicator::worker_loop() {
  worker_id_.store(std::this_thread::get_id());
  ::prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds; the default is half a nap
  bool keen = false;
  auto called = [&] {
    {
      std::lock_guard lock(mutex_);
      if (stop_ || runnable()) return true;
    }
    if (!background_) return false;
    // Who made it keen has rung before this worker could be seen asleep.
    return background_->progress() || (!keen && background_->keen());
  };
  int naps = naps_before_sleep;  // since there was something to do
  uint64_t known = 0;  // the last operation that had been issued before the last nap
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const bool wanted = runnable();
    if (wanted && queue_.front()->sequence_ <= known) {
      execute_head(lock, true);
      known = next_sequence_ - 1;  // nobody came for that one: nor, it seems, for those issued meanwhile
      naps = 0;
      continue;
    }
    known = next_sequence_ - 1;
    lock.unlock();
    if (wanted || (background_ && background_->progress())) naps = 0;
    if (background_) background_->look_at_peers();
    keen = background_ && background_->keen();
    if (wanted || (naps < naps_before_sleep && !keen)) {
      ++naps;
      std::this_thread::sleep_for(nap);
    } else {
      const bool waits = background_ && background_->wants_worker();
      transport_->sleep_as_helper(called, keen, waits ? busy_tick : idle_tick);
    }
    lock.lock();
  }
}

void Communicator::refuse_malformed(const Op& op) const {
  const std::string fault = fault_of(op, world_size());
  if (!fault.empty()) throw std::invalid_argument(transport_->where({op.kind, 0}) + fault);
}

void Communicator::look_at_lives() {
  refuse_forked();
  if (hosts_side_) return hosts_side_->look_at_lives({});
  transport_->check({});
  for (int p = 0; p < transport_->world_size(); ++p) {
    if (p == transport_->rank() || transport_->peer_closed(p) || transport_->peer_alive(p)) continue;
    if (transport_->peer_closed(p)) continue;  // it may have said so since, and then ended
    transport_->fail(ErrorKind::peer, {}, p, transport_->name(p) + " died (its process ended)");
  }
}

void Communicator::abort(const std::string& reason) { transport_->abort(reason); }

// Acknowledgements of messages that this rank has received, for which the peer has not made room yet.
void Communicator::settle_debts() {
  const auto limit = std::chrono::steady_clock::now() + longest_farewell;
  while (background_ && background_->owes() && !transport_->broken() &&
         std::chrono::steady_clock::now() < limit)
    if (!background_->progress()) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Communicator::close() {
  if (transport_->forked()) return;
  settle_debts();
  if (device_side_) device_side_->close();
  if (background_) background_->leave();
  if (hosts_side_) hosts_side_->leave();
  transport_->close();
  transport_->ring_self();
  {
    std::unique_lock lock(mutex_);
    if (stop_) return;
    // By a signal handler inside this thread's own operation, which sees it next; the destructor does the
    // rest.
    if (runs_here()) return;
    stop_ = true;
    // Whoever runs the head sees that the transport is closed and ends within a tick; then nobody runs the
    // rest.
    wake_all();
    changed_.wait(lock, [this] { return !busy_; });
    while (!queue_.empty()) execute_head(lock, false);
  }
  if (!on_worker_thread()) end_worker();
}

std::string Communicator::close_and_report() {
  if (transport_->closed()) return "";  // reported already
  std::string text;
  if (background_)
    for (const std::string& each : background_->unreceived()) text += (text.empty() ? "" : ", ") + each;
  if (!text.empty()) text = "never received: " + text + ". Every send needs a recv.";
  close();
  std::vector<CommError> errors;
  for (bool more = true; more;) {
    try {
      raise_deferred_error();
      more = false;
    } catch (const CommError& error) {
      errors.push_back(error);
    }
  }
  if (errors.empty()) return text.empty() ? "" : transport_->where({}) + text;
  const CommError& first = errors.front();
  std::string all = first.what();
  for (size_t i = 1; i < errors.size(); ++i) all += std::string(" Also ") + errors[i].what();
  if (!text.empty()) all += " Also " + text;
  throw CommError(first.kind, all, first.rank, first.world_size, first.op, first.peer);
}

void Communicator::end_worker() {
  if (worker_.joinable()) worker_.join();
  if (background_) background_->fail_all(closed_error());
}

std::exception_ptr Communicator::closed_error() const {
  return std::make_exception_ptr(CommError(ErrorKind::aborted,
                                           transport_->where({}) + "the communicator is closed", rank(),
                                           world_size(), {}, -1));
}

}  // namespace pycomm
