// communicator.cc -- see communicator.h.
#include "communicator.h"

#include <pthread.h>

namespace pycomm {

namespace {
constexpr int spins_before_sleep = 50;  // the worker that runs the operation may need this very core
constexpr auto poll_look_every = std::chrono::milliseconds(10);
constexpr auto longest_farewell = std::chrono::seconds(1);
constexpr auto worker_tick = std::chrono::milliseconds(50);
}  // namespace

Communicator::Communicator(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

Communicator::~Communicator() {
  if (transport_->forked()) {
    (void)threading_.release();
    return;
  }
  close();
  end_worker();  // where a callback on the worker thread had closed it; see release_communicator
}

// The last reference may go in a callback that the worker, or a thread of the device engine, runs: it cannot wait for its own end.
void release_communicator(Communicator* comm) {
  if (comm->on_own_thread()) std::thread([comm] { delete comm; }).detach();
  else delete comm;
}

void Communicator::attach(std::unique_ptr<BackgroundProgress> progress) {
  background_ = std::move(progress);
  transport_->set_idle_hook([this] { background_->progress(); });
}

void Communicator::attach(std::unique_ptr<DeviceEngine> engine) { device_engine_ = std::move(engine); }

void Task::wait(double timeout) { comm_.wait(*this, timeout); }
bool Task::poll() { return comm_.poll(*this); }
void Task::help(bool) { comm_.help(*this); }

void Communicator::settle(Task& task, std::exception_ptr error) {
  auto keep = std::move(task.self_);  // the last reference may go with the queue's
  task.settle(std::move(error));
}

// Before any lock: in a forked child the copied mutex may be locked, and `busy_` may speak of a thread of the parent.
void Communicator::refuse_forked() const {
  if (transport_->forked()) transport_->check({});
}

void Communicator::run(Task& task) {
  refuse_forked();
  {
    std::unique_lock lock(mutex_);
    if (busy_ || !queue_.empty()) {
      task.sequence_ = next_sequence_++;
      queue_.push_back(&task);
      lock.unlock();
      wait(task);
      return;
    }
    busy_ = true;
    task.sequence_ = next_sequence_++;
  }
  std::exception_ptr error;
  try {
    task.publish();
    task.finish(false);
  } catch (...) {
    error = std::current_exception();
  }
  {
    std::lock_guard lock(mutex_);
    busy_ = false;
    if (!queue_.empty() || stop_) changed_.notify_all();
  }
  if (error) std::rethrow_exception(error);
}

void Communicator::issue(std::shared_ptr<Task> shared) {
  refuse_forked();
  Task& task = *shared;
  std::unique_lock lock(mutex_);
  if (!busy_ && !queue_.empty() && queue_.front()->published_ && queue_.front()->ready()) execute_head(lock, false);
  task.sequence_ = next_sequence_++;
  task.self_ = std::move(shared);
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
  start_worker();
  lock.unlock();
  changed_.notify_all();
}

// Called with the lock held and busy_ false; returns with the lock held.
void Communicator::execute_head(std::unique_lock<std::mutex>& lock, bool patient) {
  Task& task = *queue_.front();
  busy_ = true;
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
  settle(task, error);  // a task on a caller's stack may be gone after this
  lock.lock();
  changed_.notify_all();
}

void Communicator::wait(Task& task, double timeout) {
  refuse_forked();
  for (int i = 0; i < spins_before_sleep && !transport_->oversubscribed(); ++i) {
    if (task.done()) break;
    if ((i & 15) == 0) {
      std::unique_lock lock(mutex_, std::try_to_lock);
      if (lock && !busy_ && !queue_.empty()) break;
    }
    cpu_relax();
  }
  std::unique_lock lock(mutex_);
  const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout > 0 ? timeout : 1e8);
  while (!task.done()) {
    if (!busy_ && !queue_.empty()) {
      if (queue_.front() == &task) task.wait_timeout_ = timeout;
      execute_head(lock, false);
      continue;
    }
    const auto status = changed_.wait_until(lock, std::chrono::time_point_cast<std::chrono::steady_clock::duration>(limit));
    if (status != std::cv_status::timeout || timeout <= 0 || task.done()) continue;
    // Somebody else runs the head, and it takes too long for this waiter: say who is missing, as its own deadline would.
    if (!queue_.empty() && queue_.front()->published_) queue_.front()->look(timeout);
    transport_->fail(ErrorKind::timeout, {}, -1,
                     "operation #" + std::to_string(task.sequence()) + " did not complete within " + std::to_string(timeout) + " s");
  }
  lock.unlock();
  if (task.error()) std::rethrow_exception(task.error());
}

bool Communicator::poll(Task& task) {
  if (task.done()) return true;
  refuse_forked();
  std::unique_lock lock(mutex_);
  while (!task.done() && !busy_ && !queue_.empty() && queue_.front()->published_ && queue_.front()->ready()) execute_head(lock, false);
  if (!task.done()) look_at_head(lock);
  return task.done();
}

// Who only polls learns of a dead peer, too.
void Communicator::look_at_head(std::unique_lock<std::mutex>& lock) {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look_ || busy_ || queue_.empty() || !queue_.front()->published_) return;
  next_look_ = now + poll_look_every;
  Task& head = *queue_.front();
  try {
    head.look(0);
  } catch (...) {
    queue_.pop_front();
    lock.unlock();
    settle(head, std::current_exception());
    lock.lock();
    changed_.notify_all();
  }
}

void Communicator::help(Task& task) {
  if (task.done()) return;
  refuse_forked();
  {
    std::lock_guard lock(mutex_);
    help_wanted_ = true;
    start_worker();
  }
  changed_.notify_all();
}

void Communicator::wake_worker() {
  refuse_forked();
  std::lock_guard lock(mutex_);
  start_worker();
  if (worker_asleep_.load()) changed_.notify_all();
  transport_->ring_self();
}

void Communicator::start_worker() {
  if (worker_.joinable() || stop_) return;
  worker_ = std::thread([this] { worker_loop(); });
  ::pthread_setname_np(worker_.native_handle(), "pycomm-worker");
}

void Communicator::worker_loop() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (help_wanted_ && !busy_ && !queue_.empty()) {
      execute_head(lock, true);
    } else if (background_ && background_->wants_worker()) {
      lock.unlock();
      if (!background_->progress()) {
        auto quit = [this] { return background_->progress() || !background_->wants_worker(); };
        transport_->sleep_unless(quit, 0.02);
      }
      lock.lock();
    } else {
      worker_asleep_.store(true);
      changed_.wait_for(lock, worker_tick);
      worker_asleep_.store(false);
    }
  }
}

void Communicator::abort(const std::string& reason) { transport_->abort(reason); }

// Acknowledgements of messages that this rank has received, for which the peer has not made room yet.
void Communicator::settle_debts() {
  const auto limit = std::chrono::steady_clock::now() + longest_farewell;
  while (background_ && background_->owes() && !transport_->broken() && std::chrono::steady_clock::now() < limit)
    if (!background_->progress()) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Communicator::close() {
  if (transport_->forked()) return;
  settle_debts();
  if (device_engine_) device_engine_->close();
  transport_->close();
  transport_->ring_self();
  {
    std::unique_lock lock(mutex_);
    if (stop_) return;
    stop_ = true;
    // Whoever runs the head sees that the transport is closed and ends within a tick; then nobody runs the rest.
    changed_.notify_all();
    changed_.wait(lock, [this] { return !busy_; });
    while (!queue_.empty()) execute_head(lock, false);
  }
  if (!on_worker_thread()) end_worker();
}

void Communicator::end_worker() {
  if (worker_.joinable()) worker_.join();
  if (background_)
    background_->fail_all(std::make_exception_ptr(
        CommError(ErrorKind::aborted, transport_->where({}) + "the communicator is closed", rank(), world_size(), {}, -1)));
}

void Communicator::on_lanes(int count, const std::function<void(int)>& body) {
  if (count <= 1) return body(0);
  std::vector<std::exception_ptr> errors(count);
  std::vector<std::thread> threads;
  auto guarded = [&](int lane) {
    try {
      body(lane);
    } catch (...) {
      errors[lane] = std::current_exception();
    }
  };
  for (int lane = 1; lane < count; ++lane) threads.emplace_back(guarded, lane);
  guarded(0);
  for (auto& thread : threads) thread.join();
  for (auto& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace pycomm
