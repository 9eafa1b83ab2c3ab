// group.cc -- see group.h: making the group, and getting operations into streams. Watching and errors are in group_watch.cc.
#include "group.h"

#include <bitset>
#include <cstring>
#include <stdexcept>

#include "../collectives/agree.h"
#include "device_memory.h"

namespace pycomm::cuda {

namespace {

constexpr size_t default_staging = 16 << 20;
constexpr size_t max_regions = 512;
constexpr size_t region_table_bytes = max_regions * max_ranks * sizeof(uint64_t);
constexpr int high_priority = -1;  // communication first: somebody waits for it on another rank

Requested requested_protocol(const std::string& name) {
  if (name.empty()) return Requested::automatic;
  if (name == "resident") return Requested::resident;
  if (name == "stream_ordered") return Requested::stream_ordered;
  throw std::invalid_argument("PYCOMM_CUDA_PROTOCOL=" + name + ": must be resident or stream_ordered");
}

EventPtr record_if_possible(EventPool& events, Stream stream) {
  try {
    return events.record(stream);
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

CudaGroup& CudaGroup::of(Communicator& comm, Device device) {
  if (comm.transport().forked()) comm.transport().check({});
  std::lock_guard lock(comm.making_device_engine());
  if (!comm.device_engine()) {
    std::unique_ptr<CudaGroup> group(new CudaGroup(comm, device));
    group->set_up();
    comm.attach(std::move(group));
  }
  auto& group = static_cast<CudaGroup&>(*comm.device_engine());
  if (group.device_ != device)
    throw std::invalid_argument(comm.transport().where({}) + "this group works on cuda:" + std::to_string(group.device_) +
                                ", the tensor is on cuda:" + std::to_string(device) + ". A rank of a group uses one device.");
  return group;
}

CudaGroup::CudaGroup(Communicator& comm, Device device)
    : comm_(comm), device_(device), driver_(require_driver()), events_(std::make_shared<EventPool>(device)) {}

CudaGroup::~CudaGroup() {
  close();
  if (comm_.transport().forked()) (void)threading_.release();
  else if (watcher_.joinable()) watcher_.join();
}

size_t CudaGroup::staging_bytes() const {
  const size_t wanted = comm_.transport().device_options().staging_bytes;
  return wanted ? wanted : default_staging;
}

// Collective. Each step that can fail on one rank alone ends in agree().
void CudaGroup::set_up() {
  const auto began = std::chrono::steady_clock::now();
  Transport& transport = comm_.transport();
  const DeviceOptions& options = transport.device_options();
  if (comm_.world_size() > max_ranks)
    throw std::invalid_argument(transport.where({}) + "groups with CUDA tensors have at most " + std::to_string(max_ranks) +
                                " ranks, this one has " + std::to_string(comm_.world_size()));
  topology_ = Topology::gather(comm_, device_, options.connections);
  agree(comm_, attempt([&] { protocol_ = choose_protocol(topology_.places, comm_.rank(), requested_protocol(options.protocol)); }));
  compare_settings();
  const ArenaShape arena = arena_shape(comm_.world_size(), staging_bytes());
  arena_ = PeerMemory::create(comm_, topology_, arena.nbytes);
  if (protocol_.protocol == Protocol::stream_ordered || topology_.one_process()) {
    host_words_ = allocate_registered(comm_, host_bytes());
  }
  agree(comm_, attempt([&] {
          ContextGuard guard(device_);
          make_host_words();
          load_kernels();
          PYCOMM_CUDA_CHECK(driver_, cuMemAlloc, &region_table_, region_table_bytes);
          zero_now(device_, reinterpret_cast<void*>(region_table_), region_table_bytes);
          shape_ = make_shape();
        }));
  setup_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// What each rank was told or found by itself must be alike.
void CudaGroup::compare_settings() {
  struct Settings {
    uint64_t staging_bytes, protocol, blocks;
  };
  const auto all = all_gather_value(
      comm_, Settings{staging_bytes(), static_cast<uint64_t>(protocol_.protocol), static_cast<uint64_t>(protocol_.blocks)});
  auto text = [](const Settings& s) {
    return "staging_bytes=" + std::to_string(s.staging_bytes) + " protocol=" + to_string(static_cast<Protocol>(s.protocol)) +
           " blocks=" + std::to_string(s.blocks);
  };
  for (int p = 1; p < comm_.world_size(); ++p)
    if (text(all[p]) != text(all[0]))
      comm_.transport().raise(ErrorKind::mismatch, {OpKind::alloc, 0}, p,
                              text(all[0]) + " on rank 0, " + text(all[p]) + " on rank " + std::to_string(p) +
                                  ". All ranks must have the same settings for CUDA tensors.");
}

void CudaGroup::make_host_words() {
  void* memory = nullptr;
  PYCOMM_CUDA_CHECK(driver_, cuMemHostAlloc, &memory, sizeof(ErrorWord), flag::host_portable | flag::host_device_map);
  error_ = static_cast<ErrorWord*>(memory);
  std::memset(memory, 0, sizeof(ErrorWord));
  if (protocol_.protocol != Protocol::stream_ordered) return;
  std::byte* words = host_words_.segment->data();  // rank 0's part serves all
  PYCOMM_CUDA_CHECK(driver_, cuMemHostRegister, words, host_bytes(), flag::host_portable | flag::host_device_map);
  DevicePtr on_device = 0;
  const int result = driver_.cuMemHostGetDevicePointer(&on_device, words, 0);
  if (result != result::success) driver_.cuMemHostUnregister(words);
  check(result, "cuMemHostGetDevicePointer");
  host_words_on_device_ = on_device;
}

// Rank 0's part of a segment that all ranks have mapped: words of sync_words.h, then a busy word per rank and line, then a stream per rank.
size_t CudaGroup::host_bytes() const {
  const size_t n = comm_.world_size();
  return round_up_to((sync_words(comm_.world_size()) + n * (1 + 2 * n)) * sizeof(uint32_t) + (n + 1) * sizeof(uint64_t), 4096);
}
std::atomic<uint32_t>* CudaGroup::host_word(size_t index) const {
  return reinterpret_cast<std::atomic<uint32_t>*>(host_words_.segment->data()) + index;
}
size_t CudaGroup::busy_word(const Line& line) const {
  return sync_words(comm_.world_size()) + comm_.rank() * (1 + 2 * comm_.world_size()) + line.number;
}
std::atomic<uint64_t>* CudaGroup::stream_in_use(int rank) const {
  const size_t n = comm_.world_size(), before = (sync_words(comm_.world_size()) + n * (1 + 2 * n)) * sizeof(uint32_t);
  return reinterpret_cast<std::atomic<uint64_t>*>(host_words_.segment->data() + round_up_to(before, sizeof(uint64_t))) + rank;
}

Shape CudaGroup::make_shape() const {
  const ArenaShape arena = arena_shape(comm_.world_size(), staging_bytes());
  Shape shape;
  shape.group.rank = comm_.rank();
  shape.group.world_size = comm_.world_size();
  for (int p = 0; p < comm_.world_size(); ++p) shape.group.arena[p] = arena_->address(p);
  shape.group.regions = reinterpret_cast<const uint64_t*>(region_table_);
  DevicePtr error = 0;
  ContextGuard guard(device_);
  PYCOMM_CUDA_CHECK(driver_, cuMemHostGetDevicePointer, &error, error_, 0);
  shape.group.error = reinterpret_cast<ErrorWord*>(error);
  shape.group.words_bytes = arena.words_bytes;
  shape.group.staging_offset = arena.staging_offset;
  shape.group.half_bytes = arena.half_bytes;
  shape.group.message_offset = arena.message_offset;
  shape.group.message_bytes = arena.message_bytes;
  shape.protocol = protocol_.protocol;
  shape.blocks = protocol_.blocks;
  // Two devices of one process reach each other's arenas, but not whatever an allocator made.
  shape.pointers = topology_.one_process() && topology_.ranks_on_my_device() == comm_.world_size();
  return shape;
}

// --- registered memory -------------------------------------------------------------------------------------------------------------------

CudaGroup::Registered CudaGroup::allocate(size_t nbytes) {
  const size_t id = free_region();
  const bool multicast = topology_.own_devices() && topology_.here().multicast;
  std::shared_ptr<PeerMemory> memory = PeerMemory::create(comm_, topology_, std::max<size_t>(nbytes, 1), multicast);
  std::byte* data = memory->address(comm_.rank());
  const auto lock = enter_group({OpKind::alloc, 0});
  if (regions_.size() <= id) regions_.resize(id + 1);
  regions_[id] = {memory, data, memory->nbytes()};
  if (memory->multicast()) shape_.multicast = true;
  uint64_t bases[max_ranks] = {};
  for (int p = 0; p < comm_.world_size(); ++p) bases[p] = reinterpret_cast<uint64_t>(memory->address(p));
  // Until all have agreed, a peer's kernel could look a handle up before this rank's table has it.
  const Verdict copied =
      attempt([&] { copy_now(device_, reinterpret_cast<std::byte*>(region_table_) + id * sizeof(bases), bases, sizeof(bases)); });
  try {
    agree(comm_, copied);
  } catch (...) {
    regions_[id] = {};
    throw;
  }
  return {std::move(memory), data};
}

// The lowest id that no rank uses; collective. What all ranks have dropped is unmapped here.
size_t CudaGroup::free_region() {
  using Ids = std::bitset<max_regions>;
  Ids used;
  {
    const auto lock = enter_group({OpKind::alloc, 0});
    for (size_t id = 0; id < regions_.size(); ++id) used[id] = regions_[id].base && !regions_[id].dropped;
  }
  Ids used_anywhere;
  for (const Ids& of_rank : all_gather_value(comm_, used)) used_anywhere |= of_rank;
  const auto lock = enter_group({OpKind::alloc, 0});
  size_t id = max_regions;
  for (size_t i = max_regions; i-- > 0;) {
    if (used_anywhere[i]) continue;
    if (i < regions_.size()) regions_[i] = {};
    id = i;
  }
  if (id == max_regions) throw std::runtime_error("more than " + std::to_string(max_regions) + " registered buffers in one group");
  return id;
}

// As on the CPU ([Note: end of a registered region] in transport/transport.h): until all ranks have dropped theirs, kernels of this rank
// may reach those of peers, so the memory stays until the next allocate() or the end of the group.
void CudaGroup::release(const Registered& registered) {
  if (comm_.transport().forked()) return;
  std::unique_lock lock(mutex_);
  if (closed_) return;
  drain(lock, std::chrono::hours(24));  // what was issued may still use it; it ends before that, as every wait of a kernel does
  for (Region& region : regions_)
    if (region.base == registered.data) region.dropped = true;
}

const CudaGroup::Region* CudaGroup::find_region(const void* data, size_t nbytes, size_t* id) const {
  const auto* p = static_cast<const std::byte*>(data);
  for (size_t i = 0; i < regions_.size(); ++i) {
    const Region& region = regions_[i];
    if (!region.base || region.dropped || p < region.base || p + nbytes > region.base + region.nbytes) continue;
    *id = i;
    return &region;
  }
  return nullptr;
}

std::byte* CudaGroup::at_peer(const void* data, size_t nbytes, int peer) {
  const auto lock = enter_group({OpKind::alloc, 0});
  size_t id = 0;
  const Region* region = find_region(data, nbytes, &id);
  return region ? region->memory->address(peer) + (static_cast<const std::byte*>(data) - region->base) : nullptr;
}

Registry CudaGroup::registry() {
  Registry registry;
  registry.handle = [this](const void* data, size_t nbytes) -> std::optional<uint64_t> {
    size_t id = 0;
    const Region* region = find_region(data, nbytes, &id);
    if (!region) return std::nullopt;
    return handle_of_region(id, static_cast<const std::byte*>(data) - region->base);
  };
  registry.multicast = [this](const void* data) -> std::byte* {
    size_t id = 0;
    const Region* region = find_region(data, 1, &id);
    const auto memory = region ? region->memory : nullptr;
    return memory && memory->multicast() ? memory->multicast() + (static_cast<const std::byte*>(data) - region->base) : nullptr;
  };
  registry.at_peer = [this](const void* data, int peer) -> std::byte* {
    size_t id = 0;
    const Region* region = find_region(data, 1, &id);
    const auto memory = region ? region->memory : nullptr;
    return memory ? memory->address(peer) + (static_cast<const std::byte*>(data) - region->base) : nullptr;
  };
  return registry;
}

// --- issuing -----------------------------------------------------------------------------------------------------------------------------

CudaWorkPtr CudaGroup::issue(const Op& op, const Issue& issue) {
  const auto lock = enter_group({op.kind, 0});
  const OpInfo info{op.kind, collectives_.issued + 1};
  look_for_failure(info);
  const double timeout = note_timeout(issue.timeout);
  const Plan steps = plan_or_explain(info, [&] { return plan(op, shape_, registry(), static_cast<uint64_t>(timeout * 1e9)); });
  return enqueue(collectives_, steps, info, issue);
}

CudaWorkPtr CudaGroup::issue(const MessageCall& message, const Issue& issue) {
  OpInfo info{message.sends ? OpKind::send : OpKind::recv, 0};
  const auto lock = enter_group(info);
  if (message.peer < 0 || message.peer >= comm_.world_size())
    throw std::invalid_argument(comm_.transport().where(info) + "rank " + std::to_string(message.peer) + " is not in this group of " +
                                std::to_string(comm_.world_size()) + (message.peer < 0 ? "; CUDA messages have a definite source" : ""));
  Line& line = line_of(message);
  info.sequence = line.issued + 1;
  look_for_failure(info);
  const double timeout = note_timeout(issue.timeout);
  const Plan steps = plan_or_explain(info, [&] { return plan_message(message, shape_, registry(), static_cast<uint64_t>(timeout * 1e9)); });
  return enqueue(line, steps, info, issue, &message);
}

CudaGroup::Line& CudaGroup::line_of(const MessageCall& message) {
  const int number = 1 + (message.sends ? 0 : comm_.world_size()) + message.peer;
  return (message.sends ? sending_ : receiving_).try_emplace(message.peer, Line{number}).first->second;
}

template <class Make>
Plan CudaGroup::plan_or_explain(const OpInfo& info, const Make& make) const {
  try {
    return make();
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(comm_.transport().where(info) + error.what());
  }
}

CudaWorkPtr CudaGroup::enqueue(Line& line, const Plan& steps, OpInfo info, const Issue& issue, const MessageCall* message) {
  ContextGuard guard(device_);
  refuse_shared_stream(info, issue.stream);
  ++line.issued;
  start_watching();
  Mark end{nullptr, issue.stream, {}};
  try {
    end.capture = capture_of(issue.stream);
    end.stream = enter(line, issue, end.capture);
    const auto busy_value = static_cast<uint32_t>(info.sequence << busy_kind_bits | static_cast<uint32_t>(info.kind));
    if (protocol_.protocol == Protocol::stream_ordered && !end.capture.active)
      line.timeouts.emplace_back(busy_value, note_timeout(issue.timeout));
    run_steps(steps, end.stream, busy_word(line), busy_value, message);
    if (issue.after) issue.after(end.stream);
    end.event = events_->record(end.stream);
  } catch (const std::exception& error) {  // some steps are in the stream, others are not: this rank is out of step with its peers
    comm_.abort(std::string(to_string(info.kind)) + " could not be enqueued: " + error.what());
    end.event = record_if_possible(*events_, end.stream);
    if (end.event) (end.capture.active ? line.captured : line.eager) = end;
    throw;
  }
  (end.capture.active ? line.captured : line.eager) = end;
  auto work = std::make_shared<CudaWork>(*this, info, issue.current, end, issue.keep);
  if ((issue.async_op || issue.watched) && !end.capture.active) pending_.push_back(work);
  return work;
}

// The stream that the operation goes to, in order behind what must come before it.
Stream CudaGroup::enter(Line& line, const Issue& issue, const Capture& capture) {
  Stream stream = issue.stream;
  if (issue.async_op) {
    if (!line.own) PYCOMM_CUDA_CHECK(driver_, cuStreamCreateWithPriority, &line.own, flag::stream_non_blocking, high_priority);
    stream = line.own;
    const EventPtr here = events_->record(issue.stream);
    PYCOMM_CUDA_CHECK(driver_, cuStreamWaitEvent, stream, here.get(), 0);
  }
  const Mark& last = capture.active ? line.captured : line.eager;
  if (last.event && last.stream != stream) order_behind(stream, last, capture);
  return stream;
}

// An event recorded in one capture, or in none, means nothing in another.
void CudaGroup::order_behind(Stream stream, const Mark& mark, const Capture& capture) {
  if (mark.capture.active != capture.active || (capture.active && mark.capture.id != capture.id)) return;
  PYCOMM_CUDA_CHECK(driver_, cuStreamWaitEvent, stream, mark.event.get(), 0);
}

// Ranks that are threads of one process must not share a stream: the second rank's kernel would be behind the first's, which waits for it.
void CudaGroup::refuse_shared_stream(const OpInfo& info, Stream stream) {
  if (!topology_.one_process() || comm_.world_size() == 1) return;
  const uint64_t mine = reinterpret_cast<uint64_t>(stream) + 1;  // the default stream is 0
  stream_in_use(comm_.rank())->store(mine);
  for (int p = 0; p < comm_.world_size(); ++p)
    if (p != comm_.rank() && topology_.places[p].device == device_ && stream_in_use(p)->load() == mine)
      throw std::invalid_argument(
          comm_.transport().where(info) + "ranks " + std::to_string(comm_.rank()) + " and " + std::to_string(p) +
          " are threads of one process and use the same CUDA stream, where one would wait behind the other for ever. Give "
          "each thread a stream of its own: with torch.cuda.stream(torch.cuda.Stream()).");
}

void CudaGroup::run_steps(const Plan& steps, Stream stream, size_t busy, uint32_t busy_value, const MessageCall* message) {
  const bool in_order = protocol_.protocol == Protocol::stream_ordered;
  if (in_order) apply({{false, busy, busy_value}}, stream);
  for (const Step& step : steps.steps) switch (step.what) {
      case Step::What::launch: launch(step.key, step.args, step.blocks, step.threads, stream); break;
      case Step::What::copy:
        PYCOMM_CUDA_CHECK(driver_, cuMemcpyAsync, reinterpret_cast<DevicePtr>(step.to), reinterpret_cast<DevicePtr>(step.from), step.nbytes,
                          stream);
        break;
      case Step::What::sync: apply(exchange_of(comm_.rank(), comm_.world_size(), syncs_++), stream); break;
      case Step::What::post: apply({half_turn(comm_.rank(), step.peer, comm_.world_size(), message->sends)}, stream); break;
      case Step::What::await: apply(half_turn_awaited(comm_.rank(), step.peer, comm_.world_size(), message->sends), stream); break;
    }
  if (in_order) apply({{false, busy, 0}}, stream);
}

void CudaGroup::apply(const std::vector<WordOperation>& operations, Stream stream) {
  for (const WordOperation& operation : operations) {
    const DevicePtr word = host_words_on_device_ + operation.word * sizeof(uint32_t);
    if (operation.waits) PYCOMM_CUDA_CHECK(driver_, cuStreamWaitValue32, stream, word, operation.value, flag::wait_eq);
    else PYCOMM_CUDA_CHECK(driver_, cuStreamWriteValue32, stream, word, operation.value, flag::write_default);
  }
}

void CudaGroup::barrier(const Issue& issue) {
  Op op;
  op.kind = OpKind::barrier;
  Issue now = issue;
  now.async_op = false;
  const CudaWorkPtr work = this->issue(op, now);
  wait_for(*work, issue.timeout > 0 ? issue.timeout : comm_.transport().timeout());
}

}  // namespace pycomm::cuda
