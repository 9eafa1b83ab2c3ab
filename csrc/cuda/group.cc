// group.cc -- see group.h.
#include "group.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "../communicator/agree.h"
#include "../transport/interrupt.h"

namespace pycomm::cuda {

namespace {
constexpr std::chrono::seconds longest_farewell{10};
constexpr std::chrono::hours for_ever{24};  // every wait of a kernel ends before that
constexpr double patience = 2;  // seconds; see [Note: meeting on the host first]
}  // namespace

// --- making it

CudaGroup::CudaGroup(Setup setup)
    : open_(std::make_unique<OpenRank>(setup.device,
                                       count_on_device(setup.topology.places, setup.topology.here(), true))),
      state_(std::move(setup)) {}

CudaGroup& CudaGroup::of(Communicator& comm, Device device) {
  if (comm.transport().forked()) comm.transport().check({});
  if (comm.hosts_side())
    throw std::invalid_argument(comm.transport().where({}) + "this group spans " +
                                comm.hosts_side()->describe() +
                                "; registered memory on devices is there for groups within one host. Use "
                                "tensors of torch, which NCCL moves between hosts.");
  std::lock_guard making(comm.making_device_side());
  if (!comm.device_side()) {
    const auto began = std::chrono::steady_clock::now();
    std::unique_ptr<CudaGroup> group(new CudaGroup(agree_on_setup(comm, device)));
    group->make();
    group->setup_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    comm.attach(std::move(group));
  }
  auto& group = static_cast<CudaGroup&>(*comm.device_side());
  if (group.device() != device)
    throw std::invalid_argument(
        comm.transport().where({}) + "this group works on cuda:" + std::to_string(group.device()) +
        ", the tensor is on cuda:" + std::to_string(device) + ". A rank of a group uses one device.");
  return group;
}

// Collective. Each step that can fail on one rank alone ends in agree().
void CudaGroup::make() {
  Communicator& comm = state_.setup.comm;
  const ArenaShape arena = arena_shape(comm.world_size(), staging_bytes(comm));
  arena_ = PeerMemory::create(comm, state_.setup.topology, arena.nbytes);
  state_.words.share();
  agree(comm, attempt([&] {
          ContextGuard guard(device());
          state_.words.make();
          load_kernels();
          registry_.make();
          shape_ = make_shape();
        }));
}

Shape CudaGroup::make_shape() const {
  const Setup& setup = state_.setup;
  const ArenaShape arena = arena_shape(setup.world_size(), staging_bytes(setup.comm));
  Shape shape;
  shape.group.rank = setup.rank();
  shape.group.world_size = setup.world_size();
  for (int p = 0; p < setup.world_size(); ++p) shape.group.arena[p] = arena_->address(p);
  shape.group.regions = registry_.table();
  shape.group.error = state_.words.error_on_device();
  shape.group.words_bytes = arena.words_bytes;
  shape.group.staging_offset = arena.staging_offset;
  shape.group.half_bytes = arena.half_bytes;
  shape.group.message_offset = arena.message_offset;
  shape.group.message_bytes = arena.message_bytes;
  shape.protocol = setup.protocol.protocol;
  shape.blocks = setup.protocol.blocks;
  shape.blocks_of_message = setup.protocol.message_blocks;
  shape.messages_in_order = setup.uses_sync_words();
  shape.pointers = setup.pointers();
  return shape;
}

Shape CudaGroup::shape() const {
  Shape shape = shape_;
  shape.multicast = registry_.multicast();
  return shape;
}

// --- issuing

CudaWorkPtr CudaGroup::issue(const Op& op, const Issue& issue) {
  const auto held = state_.lock.take({op.kind, 0});
  Line& line = state_.lines.collectives();
  Communicator& comm = state_.setup.comm;
  TracedCall call(comm, state_.times,
                  {op.kind, op.total_bytes(comm.world_size()), line.issued + 1, 0, trace::Type::device});
  const auto plan = [&](uint64_t timeout_ns) {
    return plan_collective(op, shape(), registry_.lookup(), timeout_ns);
  };
  auto work = enqueue(line, {op.kind, line.issued + 1}, issue, plan, call);
  call.done();
  return work;
}

CudaWorkPtr CudaGroup::issue(const MessageCall& message, const Issue& issue) {
  const OpKind kind = message.sends ? OpKind::send : OpKind::recv;
  Communicator& comm = state_.setup.comm;
  const auto held = state_.lock.take({kind, 0});
  if (message.peer < 0 || message.peer >= comm.world_size())
    throw std::invalid_argument(comm.transport().where({kind, 0}) + "rank " + std::to_string(message.peer) +
                                " is not in this group of " + std::to_string(comm.world_size()) +
                                (message.peer < 0 ? "; CUDA messages have a definite source" : ""));
  Line& line =
      message.sends ? state_.lines.sending_to(message.peer) : state_.lines.receiving_from(message.peer);
  TracedCall call(comm, state_.times, {kind, message.nbytes(), line.issued + 1, 0, trace::Type::device});
  const auto plan = [&](uint64_t timeout_ns) {
    return plan_message(message, shape(), registry_.lookup(), timeout_ns);
  };
  auto work = enqueue(line, {kind, line.issued + 1}, issue, plan, call);
  call.done();
  return work;
}

// With the group's lock held.
template <class Make>
CudaWorkPtr CudaGroup::enqueue(Line& line, const OpInfo& info, const Issue& issue, const Make& make_plan,
                               TracedCall& call) {
  state_.faults.look(info);
  const double timeout = state_.deadlines.note(issue.timeout);
  LaunchPlan plan;
  try {
    plan = make_plan(static_cast<uint64_t>(timeout * 1e9));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(state_.setup.comm.transport().where(info) + error.what());
  }
  watcher_.start();
  const Mark end = issuer_.enqueue(line, plan, info, issue, call);
  auto work = std::make_shared<CudaWork>(state_.works, info, issue.current, end, issue.keep);
  if ((issue.async_op || issue.watched) && !end.capture.active) state_.works.watch(work);
  return work;
}

void CudaGroup::enter_line(Stream stream) {
  const auto held = state_.lock.take({});
  state_.faults.look({});
  issuer_.enter_line(state_.lines.collectives(), {}, stream);
}

void CudaGroup::leave_line(Stream stream) {
  const auto held = state_.lock.take({});
  issuer_.leave_line(state_.lines.collectives(), stream);
}

void CudaGroup::launch_begins(Stream stream, uint64_t number) {
  if (state_.setup.comm.transport().forked()) return;
  const auto held = state_.lock.take_here();
  if (state_.faults.closed()) return;
  launches_.erase(stream);  // one that has failed
  try {
    ContextGuard guard(device());
    watcher_.start();
    const auto [call, made] =
        launches_.try_emplace(stream, state_.setup.comm, state_.times,
                              trace::Subject{OpKind::none, 0, number, 0, trace::Type::device});
    call->second.begins(stream, capture_of(stream));
  } catch (const std::exception&) {
    launches_.erase(stream);  // the launch itself finds out what is wrong
  }
}

void CudaGroup::launch_ends(Stream stream) {
  if (state_.setup.comm.transport().forked()) return;
  const auto held = state_.lock.take_here();
  const auto found = launches_.find(stream);
  if (found == launches_.end()) return;
  try {
    ContextGuard guard(device());
    found->second.ends(stream);
    found->second.done();
  } catch (const std::exception&) {  // likewise
  }
  launches_.erase(found);
}

void CudaGroup::barrier(const Issue& issue) {
  const double timeout = issue.timeout > 0 ? issue.timeout : state_.setup.comm.transport().timeout();
  meet_on_host(timeout);
  Op op;
  op.kind = OpKind::barrier;
  Issue now = issue;
  now.async_op = false;
  const CudaWorkPtr work = this->issue(op, now);
  state_.works.wait_for_end(*work, timeout);
}

// Returns when all ranks are in as many barriers as this one, or when that cannot be waited for: what is
// wrong then, the operation itself says.
void CudaGroup::meet_on_host(double timeout) const {
  Transport& transport = state_.setup.comm.transport();
  if (transport.forked()) return;
  const int me = state_.setup.rank(), n = state_.setup.world_size();
  const uint64_t mine = transport.control(me).device_barriers.fetch_add(1, std::memory_order_acq_rel) + 1;
  const auto late =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(patience, timeout / 2));
  auto come = [&](int p) {
    return p == me || transport.control(p).device_barriers.load(std::memory_order_acquire) >= mine;
  };
  for (int p = 0, round = 0; p < n;) {
    if (come(p)) {
      ++p;
      continue;
    }
    if (interrupted()) transport.abort(interrupted_text);
    if (transport.broken() || transport.peer_closed(p) || !transport.peer_alive(p) ||
        std::chrono::steady_clock::now() > late)
      return;
    if (++round < 200) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// --- registered memory

void CudaGroup::release(const Registered& registered) {
  if (state_.setup.comm.transport().forked()) return;
  auto held = state_.lock.take_here();
  if (state_.faults.closed()) return;
  watcher_.drain(held, for_ever);  // what was issued may still use it
  registry_.drop(registered.data);
}

std::byte* CudaGroup::at_peer(const void* data, size_t nbytes, int peer) {
  const auto held = state_.lock.take({OpKind::alloc, 0});
  return registry_.at_peer(data, nbytes, peer);
}

// --- the end

CudaGroup::~CudaGroup() { close(); }

void CudaGroup::close() {
  if (state_.setup.comm.transport().forked()) return;
  bool drained = false;
  {
    auto held = state_.lock.take_here();
    if (state_.faults.closed()) return;
    state_.faults.note_closed();
    if (!state_.words.made()) return;  // make() failed
    // What is under way ends by itself, or because its peers are gone.
    drained = watcher_.drain(held, longest_farewell);
    watcher_.stop();
  }
  watcher_.join();
  std::vector<Works::Ended> ended;
  {
    auto held = state_.lock.take_here();
    if (!drained) drained = watcher_.drain(held, longest_farewell, true);
    state_.times.close();
    launches_.clear();
    ended = state_.works.take_all();
  }
  for (auto& each : ended) each.complete();
  if (drained) give_back();
  else keep_for_ever();
}

void CudaGroup::give_back() {
  ContextGuard guard(device());
  state_.lines.give_back(state_.setup.driver);
  state_.line_streams.give_back();
  state_.events.reset();
  arena_.reset();
  registry_.give_back();
  state_.words.give_back();
  if (state_.setup.places) state_.setup.places->keep(0);
  open_.reset();
}

// The device does not even stop, so it keeps what it may use.
void CudaGroup::keep_for_ever() {
  (void)arena_.release();
  registry_.keep_for_ever();
  state_.line_streams.keep_for_ever();
  if (state_.setup.places) state_.setup.places->keep_for_ever();
  open_->keep_for_ever();
}

std::vector<std::pair<std::string, std::string>> CudaGroup::describe() const {
  const Setup& setup = state_.setup;
  std::ostringstream seconds;
  seconds << setup_seconds_;
  return {
      {"device", "cuda:" + std::to_string(device())},
      {"topology", setup.topology.describe()},
      {"protocol", to_string(setup.protocol.protocol)},
      {"protocol_reason", setup.protocol.reason},
      {"blocks", std::to_string(setup.protocol.blocks)},
      {"messages", setup.uses_sync_words() ? "stream_ordered" : "resident"},
      {"peer_access", arena_ ? arena_->describe() : "closed"},
      {"buffers", shape_.pointers ? "any, by pointer" : "registered ones in place, others through staging"},
      {"staging_bytes", std::to_string(2 * shape_.group.half_bytes)},
      {"arena_bytes", arena_ ? std::to_string(arena_->nbytes()) : "0"},
      {"setup_seconds", seconds.str()}};
}

}  // namespace pycomm::cuda
