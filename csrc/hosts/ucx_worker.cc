// ucx_worker.cc -- see ucx_worker.h.
#include "ucx_worker.h"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds long_wait{2};         // of a driver, before it leaves that to the pump
constexpr milliseconds longest_flush{500};   // of what the kernel has not taken yet, at the end
constexpr milliseconds longest_ending{1000};  // of endpoints closed by force
constexpr auto pause_between_looks = std::chrono::microseconds(100);

uint64_t ucx_tag(int src, uint32_t tag) { return static_cast<uint64_t>(src) << 32 | tag; }

void ring(int descriptor) { (void)::eventfd_write(descriptor, 1); }

}  // namespace

// Its members are under the worker's lock.
class UcxTicket final : public Ticket {
 public:
  UcxTicket(std::shared_ptr<UcxWorker> worker, int peer, size_t nbytes)
      : worker(std::move(worker)), peer(peer), nbytes(nbytes) {}
  ~UcxTicket() override {
    UcxWorker::Lock lock(worker->mutex_);
    worker->withdraw(*this, lock);
  }

  bool wait() override {
    UcxWorker::Lock lock(worker->mutex_);
    worker->wait(*this, lock);
    nudged = false;
    return result();
  }
  void nudge() override {
    const UcxWorker::Lock lock(worker->mutex_);
    nudged = true;
    worker->wake(*this);
  }
  bool result() const {
    if (!error.empty()) throw WireError(error);
    if (!done && worker->peers_[peer].lost) throw WireError(worker->peers_[peer].why);
    if (!done && worker->over_) throw WireError("the connection was closed here");
    return done;
  }

  std::string differs(size_t found) const {
    return "a message of " + std::to_string(found) + " bytes met a receive of " + std::to_string(nbytes);
  }

  const std::shared_ptr<UcxWorker> worker;
  const int peer;
  const size_t nbytes;
  void* request = nullptr;  // of UCX, while it is under way
  size_t place = 0;         // in UcxWorker::pending_
  bool done = false, nudged = false;
  std::string error;
  std::condition_variable changed;
};

// --- making it, and its end

UcxWorker::UcxWorker(std::shared_ptr<UcxContext> context, int rank, int world_size, int spins)
    : context_(std::move(context)),
      library_(context_->library()),
      rank_(rank),
      spins_(spins),
      peers_(world_size) {
  for (Peer& peer : peers_) peer.worker = this;
  try {
    ucx::WorkerParams params{};
    params.field_mask = ucx::WorkerParams::has_thread_mode;
    params.thread_mode = ucx::WorkerParams::serialized;
    ucx::check(library_, library_.worker_create(context_->get(), &params, &worker_), "it makes no worker");
    ucx::check(library_, library_.worker_get_efd(worker_, &descriptor_), "its network cannot be slept on");
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    wake_pump_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    wake_driver_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll_ < 0 || wake_pump_ < 0 || wake_driver_ < 0)
      throw std::runtime_error(std::string("no descriptor for a wire: ") + std::strerror(errno));
    epoll_event event{EPOLLIN, {}};
    (void)::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_pump_, &event);
    event.events = 0;
    (void)::epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor_, &event);
    enable_pump();
    thread_ = std::thread([this] { pump(); });
    ::pthread_setname_np(thread_.native_handle(), "pycomm-ucx");
  } catch (...) {
    release();
    throw;
  }
}

UcxWorker::~UcxWorker() { end(); }

void UcxWorker::release() {
  if (spoiled_) (void)new std::shared_ptr<UcxContext>(context_);  // never freed
  else if (worker_) library_.worker_destroy(worker_);
  worker_ = nullptr;
  for (int* descriptor : {&epoll_, &wake_pump_, &wake_driver_})
    if (*descriptor >= 0) ::close(std::exchange(*descriptor, -1));
}

std::string UcxWorker::address() {
  const Lock lock(mutex_);
  void* address = nullptr;
  size_t nbytes = 0;
  ucx::check(library_, library_.worker_get_address(worker_, &address, &nbytes), "it tells no address");
  std::string copy(static_cast<const char*>(address), nbytes);
  library_.worker_release_address(worker_, address);
  return copy;
}

void UcxWorker::connect(int peer, const std::string& address) {
  const Lock lock(mutex_);
  ucx::EndpointParams params{};
  params.field_mask = ucx::EndpointParams::has_address | ucx::EndpointParams::has_err_mode |
                      ucx::EndpointParams::has_err_handler;
  params.address = address.data();
  params.err_mode = ucx::EndpointParams::err_mode_peer;
  params.err_handler = &on_error;
  params.err_arg = &peers_[peer];
  const ucx::Status status = library_.ep_create(worker_, &params, &peers_[peer].endpoint);
  if (status != ucx::ok) throw WireError(library_.status_string(status));
}

// What tickets have sent is with the kernel or the network card when they are done, or UCX keeps a copy: the
// flush brings those out. It ends early where a peer takes nothing.
void UcxWorker::end() {
  {
    const Lock lock(mutex_);
    if (std::exchange(stop_, true)) return;
  }
  ring(wake_pump_);
  thread_.join();
  Lock lock(mutex_);
  ucx::RequestParams params{};
  params.op_attr_mask = ucx::RequestParams::has_callback | ucx::RequestParams::has_user_data;
  params.callback.send = &on_ended;
  params.user_data = this;
  if (void* flush = spoiled_ ? nullptr : library_.worker_flush_nbx(worker_, &params);
      flush && !ucx::is_error(flush))
    ++ending_;
  progress_until([this] { return ending_ == 0; }, longest_flush, lock);
  for (Peer& peer : peers_) close(peer);
  progress_until([this] { return ending_ == 0; }, longest_ending, lock);
  for (const auto left = pending_; UcxTicket* ticket : left)
    if (!spoiled_) library_.request_cancel(worker_, ticket->request);
  if (!pending_.empty()) spoil();
  over_ = true;
  for (UcxTicket* ticket : pending_) {
    ticket->request = nullptr;
    wake(*ticket);
  }
  while (driver_) {  // it is about to look
    lock.unlock();
    std::this_thread::sleep_for(pause_between_looks);
    lock.lock();
  }
  pending_.clear();
  release();
}

void UcxWorker::close(Peer& peer) {
  if (!peer.endpoint || spoiled_) return;
  ucx::RequestParams params{};
  params.op_attr_mask =
      ucx::RequestParams::has_callback | ucx::RequestParams::has_user_data | ucx::RequestParams::has_flags;
  params.flags = ucx::RequestParams::close_by_force;
  params.callback.send = &on_ended;
  params.user_data = this;
  void* closing = library_.ep_close_nbx(std::exchange(peer.endpoint, nullptr), &params);
  if (closing && !ucx::is_error(closing)) ++ending_;
  fail(peer, "the connection was closed here");
}

// --- what UCX calls, from progress() or cancel(), with the lock held

void UcxWorker::on_error(void* arg, ucx::Endpoint*, ucx::Status status) {
  Peer& peer = *static_cast<Peer*>(arg);
  peer.worker->fail(peer, peer.worker->library_.status_string(status));
}

void UcxWorker::on_sent(void* request, ucx::Status status, void* arg) {
  UcxTicket& ticket = *static_cast<UcxTicket*>(arg);
  const ucx::Library& library = ticket.worker->library_;
  ticket.worker->finish(ticket, status == ucx::ok ? "" : library.status_string(status));
  library.request_free(request);
}

void UcxWorker::on_received(void* request, ucx::Status status, const ucx::TagInfo* info, void* arg) {
  UcxTicket& ticket = *static_cast<UcxTicket*>(arg);
  const ucx::Library& library = ticket.worker->library_;
  std::string error;
  if (status != ucx::ok) error = library.status_string(status);
  else if (info->length != ticket.nbytes) error = ticket.differs(info->length);
  ticket.worker->finish(ticket, std::move(error));
  library.request_free(request);
}

void UcxWorker::on_ended(void* request, ucx::Status, void* arg) {
  UcxWorker& worker = *static_cast<UcxWorker*>(arg);
  --worker.ending_;
  worker.library_.request_free(request);
}

// --- messages

TicketPtr UcxWorker::send(const std::shared_ptr<UcxWorker>& self, int dst, uint32_t tag,
                          const std::byte* data, size_t nbytes) {
  auto ticket = std::make_unique<UcxTicket>(self, dst, nbytes);
  const Lock lock(mutex_);
  (void)ticket->result();
  if (!peers_[dst].endpoint) throw WireError("there is no connection");
  ucx::RequestParams params{};
  params.op_attr_mask = ucx::RequestParams::has_callback | ucx::RequestParams::has_user_data;
  params.callback.send = &on_sent;
  params.user_data = ticket.get();
  post(*ticket, library_.tag_send_nbx(peers_[dst].endpoint, data, nbytes, ucx_tag(rank_, tag), &params));
  return ticket;
}

// Of a peer that is lost a message may be there that came before.
TicketPtr UcxWorker::recv(const std::shared_ptr<UcxWorker>& self, int src, uint32_t tag, std::byte* data,
                          size_t nbytes) {
  auto ticket = std::make_unique<UcxTicket>(self, src, nbytes);
  const Lock lock(mutex_);
  if (over_) (void)ticket->result();
  ucx::RequestParams params{};
  params.op_attr_mask = ucx::RequestParams::has_callback | ucx::RequestParams::has_user_data;
  params.callback.recv = &on_received;
  params.user_data = ticket.get();
  post(*ticket, library_.tag_recv_nbx(worker_, data, nbytes, ucx_tag(src, tag), ~uint64_t{0}, &params));
  if (!ticket->done) (void)ticket->result();
  return ticket;
}

void UcxWorker::post(UcxTicket& ticket, void* result) {
  if (ucx::is_error(result)) throw WireError(library_.status_string(ucx::status_of(result)));
  ticket.request = result;
  ticket.done = result == nullptr;
  if (ticket.done) return;
  ticket.place = pending_.size();
  pending_.push_back(&ticket);
}

void UcxWorker::finish(UcxTicket& ticket, std::string error) {
  ticket.request = nullptr;
  ticket.done = error.empty();
  ticket.error = std::move(error);
  pending_.back()->place = ticket.place;
  pending_[ticket.place] = pending_.back();
  pending_.pop_back();
  wake(ticket);
}

void UcxWorker::wake(UcxTicket& ticket) {
  ticket.changed.notify_all();
  if (driver_ == &ticket && polling_) ring(wake_driver_);
}

void UcxWorker::fail(Peer& peer, const std::string& why) {
  if (std::exchange(peer.lost, true)) return;
  peer.why = why;
  for (UcxTicket* ticket : pending_)
    if (&peers_[ticket->peer] == &peer) wake(*ticket);
}

bool UcxWorker::done(const Ticket& ticket) {
  const Lock lock(mutex_);
  return static_cast<const UcxTicket&>(ticket).result();
}

void UcxWorker::withdraw(UcxTicket& ticket, Lock& lock) {
  if (!ticket.request || spoiled_) return;
  library_.request_cancel(worker_, ticket.request);
  if (!ticket.request) return;
  close(peers_[ticket.peer]);
  progress_until([&] { return !ticket.request; }, longest_ending, lock);
  if (!ticket.request) return;
  finish(ticket, "given up");  // the endpoint is closed: nobody reads or writes there
  spoil();
}

void UcxWorker::spoil() {
  spoiled_ = true;
  for (Peer& peer : peers_) fail(peer, "the connection was closed here");
}

// --- who moves the bytes

bool UcxWorker::ended(const UcxTicket& ticket) const {
  return ticket.done || ticket.nudged || !ticket.error.empty() || peers_[ticket.peer].lost || over_;
}

void UcxWorker::wait(UcxTicket& ticket, Lock& lock) {
  if (ended(ticket)) return;
  if (!driver_) drive(ticket, lock);
  ticket.changed.wait(lock, [&] { return ended(ticket); });
}

void UcxWorker::drive(UcxTicket& ticket, Lock& lock) {
  driver_ = &ticket;
  set_entry(0);
  int spins = spins_;
  while (!ended(ticket)) {
    if (progress(lock)) continue;
    if (spins-- > 0) continue;
    if (library_.worker_arm(worker_) == ucx::busy) continue;
    if (!sleep_until_event(lock)) break;
  }
  driver_ = nullptr;
  if (!over_) enable_pump();
}

bool UcxWorker::progress(Lock& lock) {
  const bool some = !spoiled_ && library_.worker_progress(worker_) != 0;
  lock.unlock();
  lock.lock();
  return some;
}

bool UcxWorker::sleep_until_event(Lock& lock) {
  pollfd events[] = {{descriptor_, POLLIN, 0}, {wake_driver_, POLLIN, 0}};
  polling_ = true;
  lock.unlock();
  const int ready = ::poll(events, 2, static_cast<int>(long_wait.count()));
  lock.lock();
  polling_ = false;
  eventfd_t rings = 0;
  if (events[1].revents) (void)::eventfd_read(wake_driver_, &rings);
  return ready != 0;
}

template <class Done>
void UcxWorker::progress_until(const Done& done, milliseconds limit, Lock& lock) {
  for (const auto end = Clock::now() + limit; !done() && Clock::now() < end;) {
    if (progress(lock)) continue;
    lock.unlock();
    std::this_thread::sleep_for(pause_between_looks);
    lock.lock();
  }
}

void UcxWorker::set_entry(uint32_t events) {
  epoll_event event{events, {}};
  (void)::epoll_ctl(epoll_, EPOLL_CTL_MOD, descriptor_, &event);
}

void UcxWorker::enable_pump() {
  if (spoiled_) return;
  do {
    while (library_.worker_progress(worker_)) continue;
  } while (library_.worker_arm(worker_) == ucx::busy);
  set_entry(EPOLLIN | EPOLLONESHOT);
}

void UcxWorker::pump() {
  for (;;) {
    epoll_event event{};
    (void)::epoll_wait(epoll_, &event, 1, -1);
    Lock lock(mutex_);
    while (!stop_ && !driver_ && progress(lock)) continue;
    if (stop_) return;
    if (!driver_) enable_pump();
  }
}

}  // namespace pycomm
