// nccl_watch.cc -- what NcclSide's thread looks after: see nccl_side.h.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <sstream>

#include "brief.h"
#include "nccl_work.h"

namespace pycomm {

namespace {

constexpr auto often = std::chrono::milliseconds(1), seldom = std::chrono::milliseconds(10);
constexpr auto rarely = std::chrono::milliseconds(100);  // with nothing under way but, it may be, a call
constexpr auto until_seldom = std::chrono::milliseconds(100);
constexpr std::chrono::seconds until_reason{1};  // for whoever knows better than NCCL to say it
constexpr double grace = 2;  // seconds: who knows which rank is missing speaks first

}  // namespace

void NcclSide::mark(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) {
  comm_.transport().mark_broken({kind, op, peer, text + " (seen by " + self() + ")"});
}

void NcclSide::fail(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) {
  mark(kind, op, peer, text);
  comm_.transport().check(op);
  comm_.raise(kind, op, peer, text);
}

void NcclSide::watch() {
  watcher_.store(std::this_thread::get_id());
  std::optional<cuda::RelaxedCapture> relaxed;  // it asks for events while others may capture
  if (cuda::driver()) relaxed.emplace();
  c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);
  std::unique_lock lock(mutex_);
  auto moved = Clock::now();
  while (!stop_) {
    if (const std::optional<Calling> calling = calling_) {
      lock.unlock();
      look_at_call(*calling);
      lock.lock();
    }
    if (pending_.empty() && comm_.transport().broken()) {  // a graph that is replayed may be in NCCL
      lock.unlock();
      abort_engine();
      lock.lock();
    }
    if (pending_.empty() && held_.empty()) {
      if (!stop_) changed_.wait_for(lock, rarely);
      moved = Clock::now();
      continue;
    }
    const std::vector<WorkPtr> works(pending_.begin(), pending_.end());
    lock.unlock();
    std::vector<WorkPtr> ended;
    for (const WorkPtr& work : works)
      if (look_at(*work)) ended.push_back(work);
    let_go_of_held();
    lock.lock();
    for (const WorkPtr& work : ended) pending_.remove(work);
    if (!ended.empty()) moved = Clock::now();
    changed_.wait_for(lock, Clock::now() - moved < until_seldom ? often : seldom);
  }
}

bool NcclSide::look_at(NcclWork& work) {
  if (work.done()) return true;  // a callback has closed the group
  try {
    try {
      comm_.hosts_side()->look_at_lives(work.info_);
    } catch (const CommError&) {
      return look_at_broken(work);
    }
    return look_at_running(work);
  } catch (const std::exception& error) {  // of the device: from then on CUDA raises it in every call
    mark(ErrorKind::aborted, work.info_, comm_.rank(), self() + " failed in it: " + brief(error));
    return false;
  }
}

// Only abort() lets a thread go that NCCL keeps.
void NcclSide::look_at_call(const Calling& calling) {
  const std::chrono::duration<double> passed = Clock::now() - calling.since;
  try {
    comm_.hosts_side()->look_at_lives(calling.op);
    if (passed.count() < calling.timeout + grace) return;
    {
      std::lock_guard lock(mutex_);
      if (!calling_ || calling_->since != calling.since) return;  // it has returned
    }
    std::ostringstream text;
    text << "a call of NCCL's did not return within the timeout of " << calling.timeout << " s";
    mark(ErrorKind::timeout, calling.op, comm_.rank(), text.str());
  } catch (const CommError&) {
    // the group is broken
  }
  abort_engine();
}

bool NcclSide::look_at_broken(NcclWork& work) {
  const std::exception_ptr broken = std::current_exception();
  abort_engine();
  if (!work.passed() && Clock::now() < stopped_by_) return false;
  const bool told = work.comparison_ && work.comparison_->done.load(std::memory_order_acquire);
  const std::exception_ptr own = told ? work.comparison_->error : nullptr;
  give_up(work, own ? own : broken);
  return true;
}

bool NcclSide::look_at_running(NcclWork& work) {
  const auto& comparison = work.comparison_;
  if (comparison && comparison->done.load(std::memory_order_acquire) && comparison->error) {
    try {
      std::rethrow_exception(comparison->error);
    } catch (const CommError& error) {
      // All ranks have found the same; NCCL may be in it already ([Note: headers beside NCCL]).
      std::string text = error.what();
      const std::string where = comm_.transport().where(work.info_);
      if (text.starts_with(where)) text.erase(0, where.size());
      mark(error.kind, work.info_, error.peer, text);
    } catch (const std::exception& error) {
      mark(ErrorKind::aborted, work.info_, comm_.rank(), self() + " failed in it: " + error.what());
    }
    return false;  // the next look ends it
  }
  if (!look_at_end(work)) {
    look_at_limit(work);
    return false;
  }
  return true;
}

bool NcclSide::look_at_end(NcclWork& work) {
  if (!work.ended()) return false;
  if (const std::exception_ptr error = work.running_->exception()) {
    const auto now = Clock::now();
    if (work.over_since_ == Clock::time_point{}) work.over_since_ = now;
    if (now - work.over_since_ < until_reason) return false;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      mark(ErrorKind::peer, work.info_, -1, "NCCL ended it: " + brief(known));
    } catch (...) {
      mark(ErrorKind::peer, work.info_, -1, "NCCL ended it");
    }
    return false;
  }
  if (work.comparison_ && !work.comparison_->done.load(std::memory_order_acquire)) return false;
  work.complete(nullptr);
  return true;
}

void NcclSide::look_at_limit(NcclWork& work) {
  const std::chrono::duration<double> passed = Clock::now() - work.began_;
  const bool compared = work.comparison_ != nullptr || checks_ == Checks::before;
  if (passed.count() < work.timeout_ + (work.comparison_ ? grace : 0)) return;
  std::ostringstream text;
  text << "NCCL did not finish it within the timeout of " << work.timeout_ << " s";
  const bool message = work.info_.kind == OpKind::send || work.info_.kind == OpKind::recv;
  if (message) text << "; messages between devices are not compared, so its other end may be missing";
  else if (compared)
    text << ", though all ranks had called it: a device or the network between them is stuck";
  else text << "; calls are not compared (PYCOMM_NCCL_CHECKS=off), so who is missing is not known";
  mark(ErrorKind::timeout, work.info_, -1, text.str());
}

}  // namespace pycomm
