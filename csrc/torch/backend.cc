// backend.cc -- see backend.h: the life of a group. Its calls are in backend_calls.cc.
#include "backend.h"

#include <algorithm>
#include <utility>

#include "interpreter.h"
#include "registered_tensor.h"
#include "shrink.h"
#include "timeouts.h"
#include "torch_store.h"

namespace pycomm {

namespace {

std::shared_ptr<Communicator> connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                      const PycommBackend::Options& options) {
  TorchStore adapter(store);
  return pycomm::connect(adapter, rank, size, options.transport, options.makers(store));
}

// Of these ranks in a part of the group, those that it has; `part`: its ranks, none: all.
std::vector<int> places_of(const std::vector<int>& ranks, const std::vector<int>& part) {
  if (part.empty()) return ranks;
  std::vector<int> places;
  for (int rank : ranks)
    if (const auto found = std::find(part.begin(), part.end(), rank); found != part.end())
      places.push_back(static_cast<int>(found - part.begin()));
  return places;
}

}  // namespace

PycommBackend::PycommBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                             c10::intrusive_ptr<Options> options)
    : PycommBackend(Joined{options, connect(store, rank, size, *options)}) {}

PycommBackend::PycommBackend(Joined joined)
    : c10d::Backend(joined.comm->rank(), joined.comm->world_size()),
      options_(std::move(joined.options)),
      comm_(std::move(joined.comm)),
      submitter_(comm_, [this] { return describe(); }, options_->timeout) {}

RecordedGroup PycommBackend::describe() const {
  RecordedGroup group;
  group.rank = rank_;
  group.name = pg_uid_.empty() ? options_->transport.name : pg_uid_;
  group.desc = pg_desc_.empty() ? "undefined" : pg_desc_;
  group.global_ranks = options_->global_ranks_in_group;
  return group;
}

PycommBackend::~PycommBackend() {
  try {
    shutdown();
  } catch (const std::exception&) {
    // nobody is left to be told
  }
}

// Ends the worker thread, which may be about to run a Python callback of a future: the GIL must be free
// meanwhile.
void PycommBackend::shutdown() {
  WithoutGilIfHeld no_gil;
  std::string unreceived;
  comm_->background()->hold_deferred_errors(false);  // torch does not end a batch in which a call has raised
  try {
    unreceived = comm_->close_and_report();
  } catch (const CommError& error) {
    throw TorchCommError(error);
  }
  if (!unreceived.empty()) TORCH_WARN(unreceived);
}

// --- memory

at::Tensor PycommBackend::allocateTensor(long size, at::TensorOptions options) {
  WithoutGilIfHeld
      no_gil;  // it waits for peers, and for operations issued before, whose callbacks take the GIL
  try {
    return empty_registered(comm_, {size}, c10::typeMetaToScalarType(options.dtype()), options.device());
  } catch (const CommError& error) {
    throw TorchCommError(error);
  }
}

bool PycommBackend::supportsTensorAlloc(c10::DeviceIndex index) {
  return index < 1 || cuda::built_with_cuda();
}

// --- life

void PycommBackend::setTimeout(std::chrono::milliseconds timeout) {
  comm_->transport().set_timeout(seconds_of_group(timeout));
  options_->timeout = timeout;
  submitter_.set_timeout(timeout);
}

c10d::ErrorType PycommBackend::getError() {
  try {
    comm_->transport().check({});
  } catch (const CommError& error) {
    if (error.kind == ErrorKind::timeout) return c10d::ErrorType::TIMEOUT;
    return error.peer >= 0 && error.peer != rank_ ? c10d::ErrorType::REMOTE_ERROR
                                                  : c10d::ErrorType::COMM_ERROR;
  }
  return c10d::ErrorType::SUCCESS;
}

void PycommBackend::abort() {
  comm_->abort("abort() of the process group was called on rank " + std::to_string(rank_));
}

void PycommBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  if (submitter_.has_hook())
    throw std::invalid_argument("pycomm: this group has an on-completion hook already");
  onCompletionHook_ = hook;  // what hasHooks() looks at
  submitter_.set_hook(std::move(hook));
}

// A part of this group: `ranks` in their order.
c10::intrusive_ptr<PycommBackend::Options> PycommBackend::options_of(const std::vector<int>& ranks,
                                                                     const std::string& name) const {
  auto options = c10::make_intrusive<Options>(*options_);
  options->transport.name = options->group_name = name;
  options->global_ranks_in_group.clear();
  for (int rank : ranks)
    options->global_ranks_in_group.push_back(
        options_->global_ranks_in_group.empty() ? rank : options_->global_ranks_in_group.at(rank));
  return options;
}

// Collective among `ranks` alone; the others get nullptr at once.
c10::intrusive_ptr<c10d::Backend> PycommBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) return nullptr;
  const bool named = opts && !opts->group_name.empty();
  auto options = options_of(ranks, named ? opts->group_name : options_->transport.name + "/split");
  if (opts) options->timeout = opts->timeout;
  options->transport.timeout = seconds_of_group(options->timeout);
  return c10::make_intrusive<PycommBackend>(store, static_cast<int>(mine - ranks.begin()),
                                            static_cast<int>(ranks.size()), std::move(options));
}

c10::intrusive_ptr<c10d::Backend> PycommBackend::shrink(const std::vector<int64_t>& ranks_to_exclude, int,
                                                        const c10::intrusive_ptr<c10d::Backend::Options>&) {
  if (shrunk_) return std::exchange(shrunk_, nullptr);
  make_shrunk({ranks_to_exclude.begin(), ranks_to_exclude.end()}, true, comm_->transport().timeout());
  return std::exchange(shrunk_, nullptr);
}

std::vector<int> PycommBackend::shrink_ahead(const std::vector<int>& exclude, double timeout) {
  return make_shrunk(exclude, false, timeout > 0 ? timeout : comm_->transport().timeout());
}

std::vector<int> PycommBackend::make_shrunk(const std::vector<int>& exclude, bool exactly, double timeout) {
  WithoutGilIfHeld no_gil;
  try {
    // One that was made ahead and has lost ranks before torch took it is the one to shrink now.
    const std::vector<int> ranks = shrunk_ ? shrunk_ranks_ : std::vector<int>();
    Shrunk made =
        pycomm::shrink(shrunk_ ? shrunk_->comm_ : comm_, places_of(exclude, ranks), exactly, timeout);
    for (int& rank : made.ranks)
      if (shrunk_) rank = ranks.at(rank);
    auto options = options_of(made.ranks, made.comm->transport().name());
    shrunk_ = c10::make_intrusive<PycommBackend>(Joined{std::move(options), std::move(made.comm)});
    shrunk_ranks_ = made.ranks;
    return made.ranks;
  } catch (const CommError& error) {
    throw TorchCommError(error);
  }
}

}  // namespace pycomm
