// nccl_watch.cc -- what NcclSide's thread looks after: see nccl_side.h.
#include <pthread.h>

#include <sstream>

#include "brief.h"
#include "nccl_work.h"

namespace pycomm {

namespace {

constexpr auto often = std::chrono::milliseconds(1), seldom = std::chrono::milliseconds(10);
constexpr auto until_seldom = std::chrono::milliseconds(100);
constexpr std::chrono::seconds until_reason{1};  // for whoever knows better than NCCL to say it
constexpr std::chrono::seconds until_stopped{2};  // for the device, after NCCL was aborted
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
  std::unique_lock lock(mutex_);
  auto moved = Clock::now();
  while (!stop_) {
    if (pending_.empty()) {
      changed_.wait(lock);
      moved = Clock::now();
      continue;
    }
    const std::vector<WorkPtr> works(pending_.begin(), pending_.end());
    lock.unlock();
    std::vector<WorkPtr> ended;
    for (const WorkPtr& work : works)
      if (look_at(*work)) ended.push_back(work);
    lock.lock();
    for (const WorkPtr& work : ended) pending_.remove(work);
    if (!ended.empty()) moved = Clock::now();
    changed_.wait_for(lock, Clock::now() - moved < until_seldom ? often : seldom);
  }
}

bool NcclSide::look_at(NcclWork& work) {
  try {
    comm_.hosts_side()->look_at_lives(work.info_);
  } catch (const CommError&) {  // the group is broken
    abort_engine();
    if (work.over_since_ == Clock::time_point{}) work.over_since_ = Clock::now();
    // The device may use the tensors until it stops.
    if (!work.ended() && Clock::now() - work.over_since_ < until_stopped) return false;
    const bool told = work.comparison_ && work.comparison_->done.load(std::memory_order_acquire);
    const std::exception_ptr own = told ? work.comparison_->error : nullptr;
    work.complete(own ? own : std::current_exception());
    return true;
  }
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

void NcclSide::abort_engine() {
  if (!backend_ || aborted_.exchange(true)) return;
  try {
    backend_->abort();
  } catch (const std::exception&) {
    // the group is broken anyway
  }
}

}  // namespace pycomm
