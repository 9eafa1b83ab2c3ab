// call.cc -- see call.h.
#include "call.h"

#include <algorithm>
#include <cstring>

#include "../arithmetic/reduce.h"
#include "../op/fingerprint.h"
#include "../transport/kernel_copy.h"
#include "visit.h"

namespace pycomm {

namespace {

constexpr size_t least_by_kernel = 4 << 10;  // no smaller part is left to the kernel unasked
constexpr size_t bytes_worth_a_lane = 512 << 10;  // below this a further thread costs more than it copies

}  // namespace

Call::Call(Communicator& comm, const Op& op, uint64_t sequence)
    : comm(comm),
      transport(comm.transport()),
      op(op),
      rank(comm.rank()),
      world_size(comm.world_size()),
      item(size_of(op.dtype)),
      sequence(sequence) {
  if (comm.served()) {
    scope = *comm.served();
    return;
  }
  scope = scope_of({op.kind, sequence}, op.timeout > 0 ? op.timeout : transport.timeout());
}

void Call::publish(bool with_payload, bool by_kernel) {
  transport.check(scope.op);
  transport.note_core();
  OpSlot& slot = transport.slot(rank, sequence);
  slot.count = op.count;
  slot.extra = extra_of(op);
  if (with_payload) {
    bool parts = !op.in_parts.empty();
    size_t total = 0;
    if (parts)
      for (const Part& part : op.in_parts) total += part.count * item;
    else if (op.in) total = op.own_count(rank) * item;
    std::byte* to = total <= inline_bytes ? slot.inline_payload : slot.payload;
    if (parts) {
      if (op.uneven) publish_parts(false);
      for (const Part& part : op.in_parts) {
        if (part.count) std::memcpy(to, part.data, part.count * item);
        to += part.count * item;
      }
    } else if (total) {
      std::memcpy(to, op.in, total);
    }
  } else {
    publish_parts(by_kernel);
  }
  if (times) {
    slot.published_ns = times->begun = trace::now_ns();
    slot.traced = static_cast<uint32_t>(sequence);
  }
  // Everything above is visible to whoever sees the key.
  slot.key.store(pack_key(op, sequence), std::memory_order_release);
  if (with_payload)
    transport.notify_if_last(
        [this](int p) { return published(p); });  // else match() does, after the first fill
}

// A rank that is not traced has left no time.
void Call::note_arrivals() {
  times->arrived = trace::now_ns();
  uint64_t latest = 0;
  for (int p = 0; p < world_size; ++p) {
    const OpSlot& slot = transport.slot(p, sequence);
    if (slot.traced != static_cast<uint32_t>(sequence) || slot.published_ns < latest) continue;
    latest = slot.published_ns;
    times->last = static_cast<uint16_t>(p);
  }
  if (times->last == rank) times->arrived = times->begun;
}

bool Call::published(int peer) const {
  return transport.slot(peer, sequence).key.load(std::memory_order_acquire) >> 32 == (sequence & 0xffffffff);
}

void Call::publish_parts(bool by_kernel) {
  OpSlot& slot = transport.slot(rank, sequence);
  slot.out_of_reach = by_kernel && !kernel_admits_peers();
  const size_t worth_a_look = !by_kernel ? SIZE_MAX : op.algorithm == Algorithm::direct ? 1 : least_by_kernel;
  for (bool output : {false, true}) {
    PartRef* table = transport.parts(rank, sequence, output);
    const auto& parts = output ? op.out_parts : op.in_parts;
    const std::byte* single = output ? op.out : op.in;
    uint32_t region = no_buffer;
    auto add = [&](int index, const std::byte* data, size_t nbytes) {
      table[index] = {reinterpret_cast<uint64_t>(data), nbytes};
      if (nbytes == 0) return;
      const uint32_t found = transport.find_region(data, nbytes);
      region = region == no_buffer || region == found ? found : 0;
      if (found == 0 && nbytes >= worth_a_look && !kernel_reaches(data, nbytes)) slot.out_of_reach = 1;
    };
    if (parts.empty()) add(0, single, single ? op.own_count(rank) * item : 0);
    else
      for (int p = 0; p < world_size; ++p) add(p, parts[p].data, parts[p].count * item);
    (output ? slot.out_region : slot.in_region) = region;
  }
}

bool Call::headers_ready() const {
  for (int p = 0; p < world_size; ++p)
    if (!published(p)) return false;
  return true;
}

void Call::match() {
  if (matched_) return;
  auto there = [this](int p) { return published(p); };
  transport.notify_if_last(there);
  transport.wait_all(there, scope);
  matched_ = true;
  if (times) note_arrivals();
  const OpSlot& mine = transport.slot(rank, sequence);
  for (int p = 0; p < world_size; ++p) {
    const OpSlot& other = transport.slot(p, sequence);
    const bool same_key =
        other.key.load(std::memory_order_relaxed) == mine.key.load(std::memory_order_relaxed);
    if (same_key && other.count == mine.count && other.extra == mine.extra) continue;
    if (!same_key || !differ_in_form_only(op.kind, mine.extra, other.extra)) compare(p);
    mixed_ = true;
  }
  if (op.kind == OpKind::all_to_all && (op.uneven || mixed_) && !op.receiver) compare_splits();
  if (mixed_ && !op.uneven) throw MixedSizes();
}

// Names the first field that differs. Every rank compares with every other, so every rank raises.
void Call::compare(int peer) const {
  const OpSlot& other = transport.slot(peer, sequence);
  transport.raise(ErrorKind::mismatch, scope.op, peer,
                  describe_call(op, {other.key.load(std::memory_order_relaxed), other.count, other.extra},
                                transport.name(peer)));
}

// Every rank reads all n*n sizes, so all come to the same verdict.
void Call::compare_splits() const {
  for (int src = 0; src < world_size; ++src)
    for (int dst = 0; dst < world_size; ++dst) {
      size_t sent = part_bytes(src, false, dst) / item, expected = part_bytes(dst, true, src) / item;
      if (sent == expected) continue;
      int other = src == rank ? dst : src;
      transport.raise(ErrorKind::mismatch, scope.op, other,
                      describe_splits(transport.name(src), sent, transport.name(dst), expected));
    }
}

size_t Call::longest_pair() {
  match();
  size_t longest = 0;
  for (int src = 0; src < world_size; ++src)
    for (int dst = 0; dst < world_size; ++dst) longest = std::max<size_t>(longest, sent(src, dst));
  return longest;
}

// Who passes no sizes publishes its count, and no table where its data are in the header.
size_t Call::part_bytes(int peer, bool output, int part) const {
  const OpSlot& slot = transport.slot(peer, sequence);
  return sizes_in_extra(slot.extra) ? peer_part(peer, output, part).nbytes : slot.count * item;
}

const std::byte* Call::payload(int peer, size_t offset) const {
  const OpSlot& slot = transport.slot(peer, sequence);
  size_t total = op.nbytes();
  if (op.uneven && op.kind == OpKind::all_to_all) {
    total = 0;
    for (int p = 0; p < world_size; ++p) total += peer_part(peer, false, p).nbytes;
  } else if (op.uneven && op.kind == OpKind::all_gather) {
    total = op.out_parts[peer].count * item;
  } else if (op.uneven && op.kind == OpKind::reduce_scatter) {
    total = 0;
    for (const Part& part : op.in_parts) total += part.count * item;
  } else if (op.kind == OpKind::reduce_scatter || op.kind == OpKind::all_to_all ||
             op.kind == OpKind::scatter) {
    total *= world_size;
  }
  return (total <= inline_bytes ? slot.inline_payload : slot.payload) + offset;
}

std::byte* Call::mapped(int peer, bool output, int part) const {
  const OpSlot& slot = transport.slot(peer, sequence);
  return transport.map_address(peer, peer_part(peer, output, part).address,
                               output ? slot.out_region : slot.in_region);
}

void Call::fetch(int peer, int part, size_t offset, void* to, size_t nbytes) const {
  if (nbytes == 0) return;
  const Visit visit(*this);
  if (const std::byte* from = mapped(peer, false, part)) std::memcpy(to, from + offset, nbytes);
  else
    transport.read_peer(peer,
                        reinterpret_cast<const std::byte*>(peer_part(peer, false, part).address) + offset, to,
                        nbytes, scope.op);
  visit.finish();
}

void Call::put(int peer, int part, size_t offset, const void* from, size_t nbytes) const {
  if (nbytes == 0) return;
  const Visit visit(*this);
  if (std::byte* to = mapped(peer, true, part)) std::memcpy(to + offset, from, nbytes);
  else
    transport.write_peer(peer, reinterpret_cast<std::byte*>(peer_part(peer, true, part).address) + offset,
                         from, nbytes, scope.op);
  visit.finish();
}

bool Call::registered(int peer) const {
  const OpSlot& slot = transport.slot(peer, sequence);
  return slot.in_region != 0 && slot.out_region != 0;
}

bool Call::all_mapped() const {
  if (transport.reach() == Transport::Reach::pointer) return true;
  for (int p = 0; p < world_size; ++p)
    if (!registered(p)) return false;
  return true;
}

bool Call::kernel_reaches_all() const {
  for (int p = 0; p < world_size; ++p)
    if (transport.slot(p, sequence).out_of_reach) return false;
  return true;
}

void Call::on_lanes(size_t nbytes, const std::function<void(int, size_t, size_t)>& body) {
  int lanes = transport.lanes();
  lanes = static_cast<int>(std::min<size_t>(lanes, std::max<size_t>(1, nbytes / bytes_worth_a_lane)));
  if (lanes == 1) return body(0, 0, nbytes);
  match();  // before several threads wait for the headers at once
  comm.on_lanes(lanes, [&](int lane) {
    Range range = chunk_of(nbytes / item, lane, lanes, item);
    body(lane, range.begin * item, range.size() * item);
  });
}

void Call::reduce_into(void* out, const void* const* sources, size_t count) const {
  const double factor = op.reduce_op != ReduceOp::avg ? op.factor : op.divisor ? op.divisor : world_size;
  reduce({op.dtype, op.reduce_op, factor}, sources, world_size, out, count);
}

}  // namespace pycomm
