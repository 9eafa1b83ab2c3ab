// backend.cc -- see backend.h. How a call is run, coalesced, recorded and ended; the calls themselves are in backend_calls.cc.
#include "backend.h"

#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>

#include "registered_tensor.h"
#include "torch_store.h"

namespace pycomm {

namespace {

std::shared_ptr<Communicator> connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const TransportOptions& options) {
  TorchStore adapter(store);
  return make_communicator(adapter, rank, size, options);
}

at::TensorList nth(at::TensorList list, size_t i) { return i < list.size() ? list.slice(i, 1) : at::TensorList(); }

std::atomic<int64_t> num_groups{0};

}  // namespace

PycommBackend::PycommBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options)
    : c10d::Backend(rank, size), options_(std::move(options)), comm_(connect(store, rank, size, options_->transport)) {}

PycommBackend::~PycommBackend() {
  try {
    shutdown();
  } catch (const std::exception&) {
    // nobody is left to be told
  }
}

// Ends the worker thread, which may be about to run a Python callback of a future: the GIL must be free meanwhile.
void PycommBackend::shutdown() {
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (Py_IsInitialized() && PyGILState_Check()) no_gil.emplace();
  comm_->close();
}

// --- memory -------------------------------------------------------------------------------------------------------------------------

at::Tensor PycommBackend::allocateTensor(long size, at::TensorOptions options) {
  std::optional<pybind11::gil_scoped_release> no_gil;  // it waits for peers, and for operations issued before, whose callbacks take the GIL
  if (PyGILState_Check()) no_gil.emplace();
  try {
    return empty_registered(comm_, {size}, c10::typeMetaToScalarType(options.dtype()), options.device());
  } catch (const CommError& error) {
    throw TorchCommError(error);
  }
}

bool PycommBackend::supportsTensorAlloc(c10::DeviceIndex index) { return index < 1 || cuda::built_with_cuda(); }

// --- running ------------------------------------------------------------------------------------------------------------------------

PycommBackend::WorkPtr PycommBackend::submit(const Call& call, Request request, at::TensorList inputs, at::TensorList outputs) {
  if (request.device.is_cuda()) return submit_on_device(call, {std::move(request)}, inputs, outputs);
  const auto task = std::make_shared<TensorTask>(*comm_, std::move(request));
  if (!call.async_op && !coalescing()) {
    run_now(call, *task, inputs, outputs);
    return nullptr;
  }
  const uint64_t entry = record(call.name, comm_->next_sequence(), call.timeout, inputs, outputs);
  if (entry) task->on_completion([work = task.get(), entry] { FlightRecorder::instance().end(entry, work->error() != nullptr); });
  comm_->issue(task);
  const uint64_t sequence = task->sequence();
  Parts parts;
  parts.push_back(task);
  return handle(call.type, call.name, sequence, std::move(parts), outputs);
}

// One Work for several tasks. All tasks are made, and so checked, before the first one starts.
PycommBackend::WorkPtr PycommBackend::submit_all(const Call& call, std::vector<Request> requests, at::TensorList inputs,
                                                 at::TensorList outputs) {
  if (!requests.empty() && requests[0].device.is_cuda()) return submit_on_device(call, std::move(requests), inputs, outputs);
  std::vector<TaskPtr> tasks;
  for (Request& request : requests) tasks.push_back(std::make_shared<TensorTask>(*comm_, std::move(request)));
  if (!call.async_op && !coalescing()) {
    for (size_t i = 0; i < tasks.size(); ++i) run_now(call, *tasks[i], nth(inputs, i), nth(outputs, i));
    return nullptr;
  }
  Parts parts;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const uint64_t entry = record(call.name, comm_->next_sequence(), call.timeout, nth(inputs, i), nth(outputs, i));
    if (entry) tasks[i]->on_completion([work = tasks[i].get(), entry] { FlightRecorder::instance().end(entry, work->error() != nullptr); });
    comm_->issue(tasks[i]);
    parts.push_back(tasks[i]);
  }
  return handle(call.type, call.name, tasks.empty() ? 0 : tasks.back()->sequence(), std::move(parts), outputs);
}

// Operations on a device return at once in either form; without async_op they are in the current stream.
PycommBackend::WorkPtr PycommBackend::submit_on_device(const Call& call, std::vector<Request> requests, at::TensorList inputs,
                                                       at::TensorList outputs) {
  RECORD_FUNCTION(call.name, std::vector<c10::IValue>());
  const bool async_op = call.async_op || coalescing();
  Parts parts;
  uint64_t sequence = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    std::shared_ptr<cuda::CudaWork> work;
    try {
      work = issue_on_device(*comm_, std::move(requests[i]), async_op, hook_ || FlightRecorder::instance().enabled());
    } catch (const CommError& error) {
      throw TorchCommError(error);
    }
    sequence = work->info().sequence;
    const bool one = requests.size() == 1;  // a list call has one request for all of its tensors
    const uint64_t entry = record(call.name, sequence, call.timeout, one ? inputs : nth(inputs, i), one ? outputs : nth(outputs, i));
    if (entry) work->on_completion([work = work.get(), entry] { FlightRecorder::instance().end(entry, work->error() != nullptr); });
    parts.push_back(std::move(work));
  }
  if (!async_op && !hook_) return nullptr;
  auto work = handle(call.type, call.name, sequence, std::move(parts), outputs);
  return async_op ? work : nullptr;
}

PycommBackend::WorkPtr PycommBackend::submit_device_message(c10d::OpType type, const char* name, const at::Tensor& tensor, int peer,
                                                            int tag) {
  try {
    auto work = type == c10d::OpType::SEND ? send_on_device(*comm_, tensor, peer, tag, 0, true)
                                           : recv_on_device(*comm_, tensor, peer, tag, 0, true);
    return submit_message(type, name, std::move(work), peer, tensor);
  } catch (const CommError& error) {
    throw TorchCommError(error);
  }
}

void PycommBackend::run_now(const Call& call, TensorTask& task, at::TensorList inputs, at::TensorList outputs) {
  RECORD_FUNCTION(call.name, std::vector<c10::IValue>());
  const uint64_t entry = record(call.name, comm_->next_sequence(), call.timeout, inputs, outputs);
  std::chrono::steady_clock::time_point started;
  if (hook_) started = std::chrono::steady_clock::now();
  try {
    comm_->run(task);
  } catch (const CommError& error) {
    FlightRecorder::instance().end(entry, true);
    throw TorchCommError(error);
  }
  FlightRecorder::instance().end(entry, false);
  if (!hook_) return;
  const auto now = std::chrono::steady_clock::now();
  hook_->call(std::make_shared<c10d::WorkInfo>(call.type, task.sequence(), started, now, std::chrono::duration<float>(now - started)));
}

PycommBackend::WorkPtr PycommBackend::submit_message(c10d::OpType type, const char* name, std::shared_ptr<Work> message, int peer,
                                                     const at::Tensor& tensor) {
  const at::TensorList tensors(&tensor, 1), none;
  const bool sends = type == c10d::OpType::SEND;
  FlightRecord head;
  head.name = name;
  head.is_p2p = true;
  head.peer = peer;
  head.sequence = num_messages_.fetch_add(1) + 1;
  const uint64_t entry = record(std::move(head), c10d::kUnsetTimeout, sends ? tensors : none, sends ? none : tensors);
  if (entry) message->on_completion([work = message.get(), entry] { FlightRecorder::instance().end(entry, work->error() != nullptr); });
  message->help();
  Parts parts;
  parts.push_back(std::move(message));
  return handle(type, name, num_messages_.load(), std::move(parts), sends ? none : tensors);
}

// The Work for what has been issued; while coalescing also a part of the batch.
PycommBackend::WorkPtr PycommBackend::handle(c10d::OpType type, const char* title, uint64_t sequence, Parts parts, at::TensorList outputs) {
  if (coalescing()) {
    batch_.parts.append(parts.begin(), parts.end());
    batch_.outputs.insert(batch_.outputs.end(), outputs.begin(), outputs.end());
  }
  auto work = c10::make_intrusive<TorchWork>(comm_, type, sequence, std::move(parts), outputs.vec(), at::hasCallbacks() ? title : nullptr);
  if (hook_ || timing_ || work->profiled()) TorchWork::observe(work, hook_);
  return work;
}

void PycommBackend::startCoalescing() {
  // A second start in the same thread means that an exception kept torch from ending the first: begin anew.
  if (coalescing_.load() && !coalescing())
    throw std::invalid_argument("pycomm: another thread is between startCoalescing() and endCoalescing()");
  batch_ = {std::this_thread::get_id(), {}, {}};
  coalescing_.store(true);
}

PycommBackend::WorkPtr PycommBackend::endCoalescing() {
  if (!coalescing()) throw std::invalid_argument("pycomm: endCoalescing() without startCoalescing() in this thread");
  coalescing_.store(false);
  return c10::make_intrusive<TorchWork>(comm_, c10d::OpType::COALESCED, comm_->next_sequence() - 1, std::move(batch_.parts),
                                        std::move(batch_.outputs), nullptr);
}

uint64_t PycommBackend::record(const char* name, uint64_t sequence, std::chrono::milliseconds timeout, at::TensorList inputs,
                               at::TensorList outputs) {
  if (!FlightRecorder::instance().enabled()) return 0;
  FlightRecord head;
  head.name = name;
  head.sequence = sequence;
  return record(std::move(head), timeout, inputs, outputs);
}

uint64_t PycommBackend::record(FlightRecord head, std::chrono::milliseconds timeout, at::TensorList inputs, at::TensorList outputs) {
  std::call_once(named_, [this] {  // torch sets the names after the constructor and before the first operation
    auto group = std::make_shared<RecordedGroup>();
    group->id = num_groups.fetch_add(1);
    group->rank = rank_;
    group->name = pg_uid_.empty() ? options_->transport.name : pg_uid_;
    group->desc = pg_desc_.empty() ? "undefined" : pg_desc_;
    group->global_ranks = options_->global_ranks_in_group;
    recorded_group_ = std::move(group);
  });
  head.group = recorded_group_;
  head.timeout_ms = (timeout > kNoTimeout ? timeout : options_->timeout).count();
  return FlightRecorder::instance().begin(head, inputs, outputs);
}

// --- life ---------------------------------------------------------------------------------------------------------------------------

void PycommBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  comm_->transport().set_timeout(std::chrono::duration<double>(timeout).count());
}

c10d::ErrorType PycommBackend::getError() {
  try {
    comm_->transport().check({});
  } catch (const CommError& error) {
    if (error.kind == ErrorKind::timeout) return c10d::ErrorType::TIMEOUT;
    return error.peer >= 0 && error.peer != rank_ ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR;
  }
  return c10d::ErrorType::SUCCESS;
}

void PycommBackend::abort() { comm_->abort("abort() of the process group was called on rank " + std::to_string(rank_)); }

void PycommBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  if (hook_) throw std::invalid_argument("pycomm: this group has an on-completion hook already");
  onCompletionHook_ = hook;  // what hasHooks() looks at
  auto shared = std::make_shared<CompletionHook>();
  shared->call = std::move(hook);
  hook_ = std::move(shared);
}

void PycommBackend::waitForPendingWorks() {
  if (!hook_) return;
  std::unique_lock lock(hook_->mutex);
  hook_->idle.wait(lock, [this] { return hook_->pending == 0; });
}

// Collective among `ranks` alone; the others get nullptr at once.
c10::intrusive_ptr<c10d::Backend> PycommBackend::split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                                       const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) return nullptr;
  auto options = c10::make_intrusive<Options>(*options_);
  options->transport.name = opts && !opts->group_name.empty() ? opts->group_name : options_->transport.name + "/split";
  if (opts) options->timeout = opts->timeout;
  options->transport.timeout = std::chrono::duration<double>(options->timeout).count();
  options->group_name = options->transport.name;
  options->global_ranks_in_group.clear();
  for (int rank : ranks)
    options->global_ranks_in_group.push_back(options_->global_ranks_in_group.empty() ? rank : options_->global_ranks_in_group.at(rank));
  return c10::make_intrusive<PycommBackend>(store, static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()),
                                            std::move(options));
}

}  // namespace pycomm
