// nccl_side.cc -- see nccl_side.h: making the engine, issuing and waiting. What goes on meanwhile is in
// nccl_watch.cc, the end in nccl_end.cc.
#include "nccl_side.h"

#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>

#include <sstream>
#include <stdexcept>
#include <system_error>

#include "../communicator/agree.h"
#include "../transport/interrupt.h"
#include "brief.h"
#include "device.h"
#include "nccl_calls.h"
#include "nccl_work.h"

namespace pycomm {

namespace {

constexpr int most_comparing = 256;  // operations that may run ahead of their headers

cuda::Capture capture_on(c10::Device device) {
  if (!cuda::driver()) return {};
  return cuda::capture_of(static_cast<cuda::Stream>(current_stream(device).native_handle()));
}

}  // namespace

NcclSide::NcclSide(Communicator& comm, NcclPlace place, MakeNccl make, Checks checks)
    : comm_(comm), place_(std::move(place)), make_(std::move(make)), checks_(checks) {}

// --- making the engine

c10d::Backend& NcclSide::engine(c10::Device device) {
  comm_.transport().check({});
  if (engine_.load() == Engine::none) make_engine(device);
  if (engine_.load() == Engine::ended) std::rethrow_exception(closed_error({}));
  if (device != device_)
    throw std::invalid_argument(comm_.transport().where({}) + "this group works on " + device_.str() +
                                ", the tensor is on " + device.str() +
                                ". A rank of a group uses one device.");
  return *backend_;
}

void NcclSide::make_engine(c10::Device device) {
  if (capture_on(device).active)
    throw std::invalid_argument(comm_.transport().where({}) +
                                "the first CUDA operation of a group cannot be captured, since it sets the "
                                "device side up. Run one before.");
  if (!make_)
    throw std::invalid_argument(comm_.transport().where({}) + "this group spans " +
                                comm_.hosts_side()->describe() +
                                "; NCCL, which moves CUDA tensors between hosts, needs ranks that are "
                                "processes, and a store of torch.distributed");
  static constexpr OpInfo making{OpKind::alloc, 0};
  all_gather_value(comm_, int{device.index()});  // all ranks are here, or the error says who is elsewhere
  try {
    backend_ = make_({place_, comm_.rank(), device.index(), comm_.transport().timeout(),
                      [this] { comm_.hosts_side()->look_at_lives(making); }});
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    comm_.transport().check(making);
    comm_.raise(ErrorKind::none, making, -1, error.what());
  }
  device_ = device;
  try {
    std::lock_guard lock(mutex_);
    if (stop_) return;  // the group has been closed meanwhile
    thread_ = std::thread([this] { watch(); });
    ::pthread_setname_np(thread_.native_handle(), "pycomm-nccl");
  } catch (const std::system_error& error) {
    fail(ErrorKind::aborted, making, comm_.rank(), self() + " could not start a thread: " + error.what());
  }
  Engine none = Engine::none;
  engine_.compare_exchange_strong(none, Engine::made);
}

// --- issuing

void NcclSide::compare(NcclWork& work, const Op& op) {
  if (checks_ == Checks::off) {
    work.info_ = {op.kind, ++unchecked_};
    return;
  }
  Op headers = op;
  headers.on_device = true;
  if (checks_ == Checks::before) {
    CollectiveTask task(comm_, std::move(headers));
    comm_.run(task);
    work.info_.sequence = task.sequence();
    return;
  }
  while (comparing_->load() >= most_comparing) {
    comm_.transport().check(work.info_);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  auto task = std::make_shared<CollectiveTask>(comm_, std::move(headers));
  auto comparison = std::make_shared<Comparison>();
  comparing_->fetch_add(1);
  comm_.issue(task);
  work.info_.sequence = task->sequence();
  work.comparison_ = comparison;
  task->on_completion([comparison, comparing = comparing_, headers = task.get()] {
    comparison->error = headers->error();
    comparison->done.store(true, std::memory_order_release);
    comparing->fetch_sub(1);
  });
  task->help(true);
}

cuda::DeviceWorkPtr NcclSide::issue(Request request, bool async_op) {
  c10::NoGradGuard no_grad;
  Op& op = request.op;
  op.algorithm = Algorithm::automatic;  // NCCL chooses
  comm_.refuse_malformed(op);
  if (const std::string fault = fault_on_nccl(op); !fault.empty())
    throw std::invalid_argument(comm_.transport().where({op.kind, 0}) + fault);
  const Turn turn(*this);
  c10d::Backend& backend = engine(request.device);
  auto work =
      std::make_shared<NcclWork>(*this, OpInfo{op.kind, 0}, request.device, limit_of(request.op.timeout));
  work->keep_ = std::move(request.keep);
  work->copy_back_ = std::move(request.copy_back);
  compare(*work, op);
  start(work, [&] { return call_nccl(backend, op, request.device); });
  if (!async_op) work->order_current();
  return work;
}

cuda::DeviceWorkPtr NcclSide::send(const at::Tensor& dense, const MessageOptions& options, bool async_op) {
  const Turn turn(*this);
  c10d::Backend& backend = engine(dense.device());
  auto work = std::make_shared<NcclWork>(*this, OpInfo{OpKind::send, ++messages_}, dense.device(),
                                         limit_of(options.timeout));
  work->keep_ = {dense};
  start(work, [&] {
    Tensors tensors{dense};
    return backend.send(tensors, options.peer, options.tag);
  });
  if (!async_op) work->order_current();
  return work;
}

cuda::DeviceWorkPtr NcclSide::recv(const at::Tensor& dense, const at::Tensor& target,
                                   const MessageOptions& options, bool async_op) {
  c10::NoGradGuard no_grad;
  const Turn turn(*this);
  c10d::Backend& backend = engine(dense.device());
  auto work = std::make_shared<NcclWork>(*this, OpInfo{OpKind::recv, ++messages_}, dense.device(),
                                         limit_of(options.timeout));
  work->keep_ = {dense};
  if (!dense.is_same(target)) work->copy_back_ = {{target, dense}};
  start(work, [&] {
    Tensors tensors{dense};
    return backend.recv(tensors, options.peer, options.tag);
  });
  if (!async_op) work->order_current();
  return work;
}

NcclSide::Call::Call(NcclSide& side, const OpInfo& op, double timeout) : side_(side) {
  std::lock_guard lock(side.mutex_);
  side.calling_ = {op, timeout, Clock::now()};
}

NcclSide::Call::~Call() {
  std::lock_guard lock(side_.mutex_);
  side_.calling_.reset();
}

// In a handler: what went wrong on the way to the watch, which is the group's error: what NCCL refuses on
// this rank alone would leave the others waiting. The works that did not get there end with it.
void NcclSide::end_unfollowed(const OpInfo& op, const WorkPtr* first, const WorkPtr* last) {
  std::exception_ptr told;
  try {
    try {
      throw;
    } catch (const CommError&) {
      throw;
    } catch (const std::exception& error) {
      fail(ErrorKind::aborted, op, comm_.rank(), self() + " failed in it: NCCL: " + brief(error));
    }
  } catch (...) {
    told = std::current_exception();
  }
  for (const auto limit = Clock::now() + until_stopped; first != last; ++first)
    give_up_by(limit, **first, told);
  std::rethrow_exception(told);
}

template <class Start>
void NcclSide::start(const WorkPtr& work, const Start& start) {
  work->captured_ = capture_on(work->device_).active;
  try {
    {
      const Call call(*this, work->info_, work->timeout_);
      work->running_ = start();
    }
    if (!batch_open_) follow(work);
  } catch (...) {
    end_unfollowed(work->info_, &work, &work + 1);
  }
  if (batch_open_) batch_.push_back(work);
}

// It has been started: the copies of its results behind it, and the watch.
void NcclSide::follow(const WorkPtr& work) {
  if (!work->copy_back_.empty())
    work->copied_ = work->mark_behind([&] {
      for (auto& [target, dense] : work->copy_back_) target.copy_(dense);
    });
  if (work->captured_) return work->complete(nullptr);  // it runs when the graph is replayed
  std::lock_guard lock(mutex_);
  if (stop_)  // another thread has closed the group while this one was in NCCL
    std::rethrow_exception(closed_error(work->info_));
  pending_.push_back(work);
  changed_.notify_all();
}

void NcclSide::start_batch(c10::Device device) {
  const Turn turn(*this);
  if (batch_open_) return;
  engine(device).startCoalescing();
  batch_open_ = true;
}

void NcclSide::end_batch() {
  const Turn turn(*this);
  if (!std::exchange(batch_open_, false)) return;
  const std::vector<WorkPtr> works = std::exchange(batch_, {});
  const OpInfo info = works.empty() ? OpInfo{} : works.back()->info_;
  size_t followed = 0;
  try {
    c10d::Backend& backend = engine(device_);
    {
      const Call call(*this, info, works.empty() ? limit_of(0) : works.back()->timeout_);
      const auto all = backend.endCoalescing();
      for (const WorkPtr& work : works) work->running_ = all;
    }
    for (; followed < works.size(); ++followed) follow(works[followed]);
  } catch (...) {
    end_unfollowed(info, works.data() + followed, works.data() + works.size());
  }
}

// --- waiting

NcclWork::NcclWork(NcclSide& side, OpInfo info, c10::Device device, double timeout)
    : side_(side), info_(info), device_(device), timeout_(timeout) {}

void NcclWork::order(cuda::Stream stream) {
  const c10::StreamGuard guard(as_torch_stream(stream, device_));
  order_current();
}

void NcclWork::order_current() {
  if (!running_)
    throw std::invalid_argument(side_.comm_.transport().where(info_) +
                                "an operation that is being coalesced has not started yet");
  if (copied_) return copied_->block(current_stream(device_));
  const c10::StreamGuard guard(current_stream(device_));
  running_->wait();
}

void NcclWork::wait(double timeout) {
  if (done() && error()) std::rethrow_exception(error());
  if (!done()) side_.comm_.transport().check(info_);
  const auto limit = Clock::now() + std::chrono::duration<double>(std::min(timeout, 1e8));
  while (timeout > 0 && !captured_ && !done()) {
    if (interrupted()) side_.comm_.transport().abort(interrupted_text);
    if (Clock::now() > limit) {
      std::ostringstream text;
      text << "NCCL did not finish it within the timeout of " << timeout << " s";
      side_.fail(ErrorKind::timeout, info_, -1, text.str());
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (done() && error()) std::rethrow_exception(error());
  try {
    order_current();
  } catch (const std::invalid_argument&) {
    throw;
  } catch (const std::exception& error) {
    side_.comm_.transport().check(info_);
    side_.fail(ErrorKind::peer, info_, -1, "NCCL ended it: " + brief(error));
  }
}

bool NcclWork::ended() const {
  if (!running_) return false;
  if (copied_) return copied_->query() || running_->exception();
  return running_->isCompleted();
}

bool NcclWork::passed() {
  if (!running_) return true;  // never started
  try {
    if (!copied_ && !passed_) passed_ = mark_behind([] {});
    return (copied_ ? copied_ : passed_)->query();
  } catch (const std::exception&) {
    return false;  // the device has failed: nothing is known of its memory
  }
}

// What `then` enqueues runs behind NCCL, in a stream of its own; so does the result.
std::shared_ptr<c10::Event> NcclWork::mark_behind(const std::function<void()>& then) const {
  const c10::impl::VirtualGuardImpl guard(device_.type());
  const c10::StreamGuard beside(guard.getStreamFromGlobalPool(device_));
  running_->wait();
  then();
  auto mark = std::make_shared<c10::Event>(device_.type());
  mark->record(beside.current_stream());
  return mark;
}

void NcclSide::drain(double timeout) {
  if (engine_.load() != Engine::made) return;
  c10::Event here(device_.type());
  here.record(current_stream(device_));
  const double limit = limit_of(timeout);
  const auto deadline = Clock::now() + std::chrono::duration<double>(std::min(limit, 1e8));
  const OpInfo info{OpKind::barrier, comm_.next_sequence()};
  auto idle = [this] {
    std::lock_guard lock(mutex_);
    return pending_.empty();
  };
  while (!here.query() || !idle()) {
    comm_.hosts_side()->look_at_lives(info);
    if (interrupted()) comm_.transport().abort(interrupted_text);
    if (Clock::now() > deadline) {
      std::ostringstream text;
      text << "the device of " << self() << " did not finish within the timeout of " << limit << " s";
      fail(ErrorKind::timeout, info, comm_.rank(), text.str());
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace pycomm
