// submit.cc -- see submit.h.
#include "submit.h"

#include <ATen/record_function.h>

#include <optional>

#include "interpreter.h"
#include "nccl_side.h"

namespace pycomm {

namespace {

at::TensorList nth(at::TensorList list, size_t i) {
  return i < list.size() ? list.slice(i, 1) : at::TensorList();
}

std::atomic<int64_t> num_groups{0};

const char* title_of(const TorchCall& call) { return call.title ? call.title : call.name; }

// An event of torch's profiler: one per call, with the shapes of its inputs, and marked asynchronous, as
// those of torch's own backends are.
class Event {
 public:
  Event(const TorchCall& call, at::TensorList inputs) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks.has_value()) return;
    const std::vector<c10::IValue> arguments(inputs.begin(), inputs.end());
    function_.emplace(std::move(*callbacks));
    function_->_setAsync();
    function_->before(title_of(call), &arguments);
  }

 private:
  std::optional<at::RecordFunction> function_;
};

// Ends the flight record `id`, if there is one, with the work.
void end_record_with(Work& work, uint64_t id) {
  if (id) work.before_done([&work, id] { FlightRecorder::instance().end(id, work.error() != nullptr); });
}

}  // namespace

WorkPtr Submitter::submit(const TorchCall& call, Request request, at::TensorList inputs,
                          at::TensorList outputs) {
  if (request.device.is_cuda()) return submit_on_device(call, {std::move(request)}, inputs, outputs);
  return submit(call, std::make_shared<TensorTask>(*comm_, std::move(request)), inputs, outputs);
}

WorkPtr Submitter::submit(const TorchCall& call, const TaskPtr& task, at::TensorList inputs,
                          at::TensorList outputs) {
  if (!call.async_op && !coalescing()) {
    const Event event(call, inputs);
    run_now(call, *task, inputs, outputs);
    return nullptr;
  }
  end_record_with(*task, record(call, comm_->next_sequence(), inputs, outputs));
  comm_->issue(task);
  const uint64_t sequence = task->sequence();
  Parts parts;
  parts.push_back(task);
  return handle(call, sequence, std::move(parts), inputs, outputs);
}

// All tasks are made, and so checked, before the first one starts.
WorkPtr Submitter::submit_all(const TorchCall& call, std::vector<Request> requests, at::TensorList inputs,
                              at::TensorList outputs) {
  if (!requests.empty() && requests[0].device.is_cuda())
    return submit_on_device(call, std::move(requests), inputs, outputs);
  std::vector<TaskPtr> tasks;
  for (Request& request : requests) tasks.push_back(std::make_shared<TensorTask>(*comm_, std::move(request)));
  if (!call.async_op && !coalescing()) {
    const Event event(call, inputs);
    for (size_t i = 0; i < tasks.size(); ++i) run_now(call, *tasks[i], nth(inputs, i), nth(outputs, i));
    return nullptr;
  }
  Parts parts;
  for (size_t i = 0; i < tasks.size(); ++i) {
    end_record_with(*tasks[i], record(call, comm_->next_sequence(), nth(inputs, i), nth(outputs, i)));
    comm_->issue(tasks[i]);
    parts.push_back(tasks[i]);
  }
  return handle(call, tasks.empty() ? 0 : tasks.back()->sequence(), std::move(parts), inputs, outputs);
}

// Operations on a device return at once in either form; without async_op they are in the current stream.
WorkPtr Submitter::submit_on_device(const TorchCall& call, std::vector<Request> requests,
                                    at::TensorList inputs, at::TensorList outputs) {
  const Event event(call, inputs);
  const bool async_op = call.async_op || coalescing();
  if (!requests.empty()) batch_on_device(requests[0].device);
  Parts parts;
  uint64_t sequence = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    cuda::DeviceWorkPtr work;
    try {
      work = issue_on_device(*comm_, std::move(requests[i]), async_op,
                             hook_ || FlightRecorder::instance().enabled());
    } catch (const CommError& error) {
      throw TorchCommError(error);
    }
    sequence = work->info().sequence;
    const bool one = requests.size() == 1;  // a list call has one request for all of its tensors
    end_record_with(*work,
                    record(call, sequence, one ? inputs : nth(inputs, i), one ? outputs : nth(outputs, i)));
    parts.push_back(std::move(work));
  }
  if (!async_op && !hook_) return nullptr;
  auto work = handle(call, sequence, std::move(parts), inputs, outputs);
  return async_op ? work : nullptr;
}

void Submitter::run_now(const TorchCall& call, TensorTask& task, at::TensorList inputs,
                        at::TensorList outputs) {
  HangIfPythonEnded returns_to_torch;
  const uint64_t id = record(call, comm_->next_sequence(), inputs, outputs);
  std::chrono::steady_clock::time_point started;
  if (hook_) started = std::chrono::steady_clock::now();
  try {
    comm_->run(task);
  } catch (const CommError& error) {
    FlightRecorder::instance().end(id, true);
    throw TorchCommError(error);
  } catch (...) {
    FlightRecorder::instance().end(id, true);
    throw;
  }
  FlightRecorder::instance().end(id, false);
  if (!hook_) return;
  const auto now = std::chrono::steady_clock::now();
  hook_->call(std::make_shared<c10d::WorkInfo>(call.type, task.sequence(), started, now,
                                               std::chrono::duration<float>(now - started)));
}

// Between hosts what is coalesced is one call of NCCL's.
void Submitter::batch_on_device(c10::Device device) {
  NcclSide* side = coalescing() ? NcclSide::of(*comm_) : nullptr;
  if (!side) return;
  try {
    side->start_batch(device);
  } catch (const CommError& error) {
    throw TorchCommError(error);
  }
}

std::shared_ptr<Work> Submitter::start_message(const TorchMessage& call, const at::Tensor& tensor) {
  const MessageOptions options{call.peer, call.tag};
  if (tensor.is_cuda()) batch_on_device(tensor.device());
  if (!tensor.is_cuda())
    return call.sends() ? send_tensor(*comm_, tensor, options) : recv_tensor(*comm_, tensor, options);
  return call.sends() ? send_on_device(*comm_, tensor, options, true)
                      : recv_on_device(*comm_, tensor, options, true);
}

WorkPtr Submitter::submit_message(const TorchMessage& call, const at::Tensor& tensor) {
  std::shared_ptr<Work> message;
  try {
    message = start_message(call, tensor);
  } catch (const CommError& error) {
    if (tensor.is_cuda()) throw TorchCommError(error);
    throw;
  }
  const at::TensorList tensors(&tensor, 1), none;
  FlightRecord head;
  head.name = call.name;
  head.is_p2p = true;
  head.peer = call.peer;
  head.sequence = num_messages_.fetch_add(1) + 1;
  end_record_with(*message, record(std::move(head), c10d::kUnsetTimeout, call.sends() ? tensors : none,
                                   call.sends() ? none : tensors));
  message->help();
  Parts parts;
  parts.push_back(std::move(message));
  return handle({call.type, call.name, c10d::kUnsetTimeout, true, call.title}, num_messages_.load(),
                std::move(parts), tensors, call.sends() ? none : tensors);
}

// The Work for what has been issued; while coalescing also a part of the batch.
WorkPtr Submitter::handle(const TorchCall& call, uint64_t sequence, Parts parts, at::TensorList inputs,
                          at::TensorList outputs) {
  if (coalescing()) {
    batch_.parts.append(parts.begin(), parts.end());
    batch_.outputs.insert(batch_.outputs.end(), outputs.begin(), outputs.end());
  }
  auto work = c10::make_intrusive<TorchWork>(comm_, call.type, sequence, std::move(parts), outputs.vec(),
                                             at::hasCallbacks() ? title_of(call) : nullptr, inputs);
  if (hook_ || timing_ || work->profiled()) TorchWork::observe(work, hook_);
  return work;
}

void Submitter::start_coalescing() {
  // A second start in the same thread means that an exception kept torch from ending the first: begin anew.
  if (coalescing_.load() && !coalescing())
    throw std::invalid_argument("pycomm: another thread is between startCoalescing() and endCoalescing()");
  end_batch_on_device();
  batch_ = {std::this_thread::get_id(), {}, {}};
  coalescing_.store(true);
  // If a call in a batch raises, torch keeps the batch open and only collects all later calls.
  comm_->background()->hold_deferred_errors(true);
}

void Submitter::end_batch_on_device() {
  NcclSide* side = NcclSide::of(*comm_);
  if (!side) return;
  try {
    side->end_batch();
  } catch (const CommError& error) {
    throw TorchCommError(error);
  }
}

WorkPtr Submitter::end_coalescing() {
  if (!coalescing())
    throw std::invalid_argument("pycomm: endCoalescing() without startCoalescing() in this thread");
  coalescing_.store(false);
  comm_->background()->hold_deferred_errors(false);
  end_batch_on_device();
  return c10::make_intrusive<TorchWork>(comm_, c10d::OpType::COALESCED, comm_->next_sequence() - 1,
                                        std::move(batch_.parts), std::move(batch_.outputs), nullptr,
                                        at::TensorList());
}

uint64_t Submitter::record(const TorchCall& call, uint64_t sequence, at::TensorList inputs,
                           at::TensorList outputs) {
  if (!FlightRecorder::instance().enabled()) return 0;
  FlightRecord head;
  head.name = call.name;
  head.sequence = sequence;
  return record(std::move(head), call.timeout, inputs, outputs);
}

uint64_t Submitter::record(FlightRecord head, std::chrono::milliseconds timeout, at::TensorList inputs,
                           at::TensorList outputs) {
  std::call_once(described_, [this] {
    auto group = std::make_shared<RecordedGroup>(describe_());
    group->id = num_groups.fetch_add(1);
    recorded_group_ = std::move(group);
  });
  head.group = recorded_group_;
  head.timeout_ms = (timeout > kNoTimeout ? timeout : timeout_.load()).count();
  return FlightRecorder::instance().begin(head, inputs, outputs);
}

void Submitter::set_hook(std::function<void(std::shared_ptr<c10d::WorkInfo>)> hook) {
  hook_ = std::make_shared<CompletionHook>();
  hook_->call = std::move(hook);
}

void Submitter::wait_for_hooks() {
  if (!hook_) return;
  std::unique_lock lock(hook_->mutex);
  hook_->idle.wait(lock, [this] { return hook_->pending == 0; });
}

}  // namespace pycomm
