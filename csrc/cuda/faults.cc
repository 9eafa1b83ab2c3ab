// faults.cc -- see faults.h.
#include "faults.h"

#include <bit>
#include <utility>

#include "announce.h"

namespace pycomm::cuda {

std::string names_of(uint32_t ranks) {
  std::string text = std::popcount(ranks) > 1 ? "ranks " : "rank ";
  for (uint32_t rest = ranks; rest; rest &= rest - 1)
    text += (rest == ranks ? "" : ", ") + std::to_string(std::countr_zero(rest));
  return text;
}

void Faults::note(ErrorKind kind, const OpInfo& info, int peer, const std::string& text) {
  try {
    setup_.comm.transport().fail(kind, info, peer, text);
  } catch (const CommError&) {
    failure_ = std::current_exception();
    failed_ = info;
  }
}

void Faults::read() {
  ErrorWord& error = words_.error();
  read_record(error.records[0], OpKind::none);
  for (int p = 0; p < setup_.world_size(); ++p) {
    read_record(error.records[record_of_sending(p)], OpKind::send);
    read_record(error.records[record_of_receiving(p)], OpKind::recv);
  }
}

void Faults::read_record(ErrorRecord& record, OpKind message) {
  const auto fault = static_cast<Fault>(__atomic_load_n(&record.fault, __ATOMIC_ACQUIRE));
  if (fault == Fault::none) return;
  const ErrorRecord seen = record;
  __atomic_store_n(&record.fault, 0, __ATOMIC_RELEASE);
  const OpInfo info{message == OpKind::none ? Meta::unpack(seen.here.meta).kind : message, seen.epoch};
  const int peer = static_cast<int>(seen.peer);
  const std::string missing = names_of(static_cast<uint32_t>(seen.missing));
  if (fault == Fault::mismatch) note_mismatch(seen, info);
  else if (fault == Fault::timeout)
    note(ErrorKind::timeout, info, peer, missing + " did not arrive within the timeout");
  else if (fault == Fault::gave_up)
    note(ErrorKind::timeout, info, peer, missing + " had given up when this rank came to the operation");
  else
    note(ErrorKind::aborted, info, peer,
         missing +
             ": what it had to send is not there, though stream memory operations say so (an error of "
             "pycomm or of the driver)");
}

void Faults::note_mismatch(const ErrorRecord& seen, const OpInfo& info) {
  const int peer = static_cast<int>(seen.peer);
  const bool told_elsewhere = seen.here.meta == seen.there.meta && seen.here.count == seen.there.count &&
                              seen.here.extra == seen.there.extra;
  const std::string text =
      told_elsewhere ? "rank " + std::to_string(peer) +
                           " found that its sizes differ from those of another rank. in_splits[dst] "
                           "of the sender must equal out_splits[src] of the receiver."
                     : describe_difference(seen.here, seen.there, peer);
  // In stream order ranks that disagree may take unequally many turns. A message between pointers has one.
  const bool message = info.kind == OpKind::send || info.kind == OpKind::recv;
  if (setup_.stream_ordered() || (message && setup_.uses_sync_words() && !setup_.pointers()))
    return note(ErrorKind::mismatch, info, peer, text);
  try {
    setup_.comm.transport().raise(ErrorKind::mismatch, info, peer, text);
  } catch (const CommError&) {
    if (failure_) return;
    failure_ = std::current_exception();
    failed_ = info;
  }
}

void Faults::look(const OpInfo& info) {
  const Transport& transport = setup_.comm.transport();
  if (closed_) transport.raise(ErrorKind::aborted, info, -1, "the communicator is closed");
  read();
  rethrow();
  transport.check(info);
}

void Faults::rethrow() {
  if (failure_) std::rethrow_exception(broken() ? failure_ : std::exchange(failure_, nullptr));
}

std::exception_ptr Faults::of(const OpInfo& info) const {
  const bool same = failed_.sequence == info.sequence && failed_.kind == info.kind;
  if (failure_ && (broken() || same)) return failure_;
  try {
    if (broken()) setup_.comm.transport().check(info);
  } catch (const CommError&) {
    return std::current_exception();
  }
  return nullptr;
}

std::exception_ptr Faults::take_of(const OpInfo& info) {
  const std::exception_ptr error = of(info);
  if (error && !broken()) failure_ = nullptr;
  return error;
}

void Faults::forget(const std::exception_ptr& error) {
  if (failure_ == error && !broken()) failure_ = nullptr;
}

bool Faults::reached(const EventPtr& event) {
  ContextGuard guard(setup_.device);
  const int result = setup_.driver.cuEventQuery(event.get());
  if (result == result::not_ready) return false;
  if (result != result::success && !broken())
    note(ErrorKind::aborted, {}, setup_.rank(),
         "the device of rank " + std::to_string(setup_.rank()) +
             " has failed: " + describe_result(result, "cuEventQuery"));
  return true;
}

}  // namespace pycomm::cuda
