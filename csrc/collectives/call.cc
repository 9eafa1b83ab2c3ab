// call.cc -- see call.h.
#include "call.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <sstream>

#include "../reduce/reduce.h"

namespace pycomm {

namespace {

constexpr size_t bytes_worth_a_lane = 512 << 10;  // below this a further thread costs more than it copies

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
  return hash ^ (hash >> 32);
}

}  // namespace

Range chunk_of(size_t count, int index, int chunks, size_t item) {
  size_t line = std::max<size_t>(1, cache_line / item);
  size_t lines = (count + line - 1) / line;
  size_t begin = lines * index / chunks * line, end = lines * (index + 1) / chunks * line;
  return {std::min(begin, count), std::min(end, count)};
}

Call::Call(Communicator& comm, const Op& op, uint64_t sequence)
    : comm(comm), transport(comm.transport()), op(op), rank(comm.rank()), world_size(comm.world_size()), item(size_of(op.dtype)) {
  scope.op = {op.kind, sequence};
  scope.timeout = op.timeout > 0 ? op.timeout : transport.timeout();
  scope.deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                          std::chrono::duration<double>(std::min(scope.timeout, 1e8)));
}

uint64_t Call::key(uint64_t sequence) const {
  return sequence << 32 | static_cast<uint64_t>(op.kind) << 27 | static_cast<uint64_t>(op.dtype) << 22 |
         static_cast<uint64_t>(op.reduce_op) << 18 | static_cast<uint64_t>(op.algorithm) << 14 | static_cast<uint64_t>(op.root);
}

// What the key and the count leave out. all_to_all's uneven splits differ from rank to rank and are compared pairwise instead.
uint64_t Call::extra() const {
  uint64_t hash = op.uneven;
  if (op.uneven && op.kind != OpKind::all_to_all)
    for (const Part& part : op.kind == OpKind::all_gather ? op.out_parts : op.in_parts) hash = mix(hash, part.count);
  if (op.reduces() && op.reduce_op == ReduceOp::premul_sum) {
    const uint64_t bits = std::bit_cast<uint64_t>(op.factor);
    return op.uneven ? mix(hash, bits) : bits;  // readable for the error where nothing else is in it
  }
  return hash;
}

void Call::publish(bool with_payload) {
  transport.check(scope.op);
  transport.note_core();
  OpSlot& slot = transport.slot(rank, scope.op.sequence);
  slot.count = op.count;
  slot.extra = extra();
  if (with_payload) {
    bool parts = !op.in_parts.empty();
    size_t total = 0;
    if (parts)
      for (const Part& part : op.in_parts) total += part.count * item;
    else if (op.in) total = op.own_count(rank) * item;
    std::byte* to = total <= inline_bytes ? slot.inline_payload : slot.payload;
    if (parts) {
      if (op.uneven) publish_parts();
      for (const Part& part : op.in_parts) {
        if (part.count) std::memcpy(to, part.data, part.count * item);
        to += part.count * item;
      }
    } else if (total) {
      std::memcpy(to, op.in, total);
    }
  } else {
    publish_parts();
  }
  slot.key.store(key(scope.op.sequence), std::memory_order_release);  // everything above is visible to whoever sees the key
  if (with_payload) transport.notify_if_last([this](int p) { return published(p); });  // else match() does, after the first fill
}

bool Call::published(int peer) const {
  return transport.slot(peer, scope.op.sequence).key.load(std::memory_order_acquire) >> 32 == (scope.op.sequence & 0xffffffff);
}

void Call::publish_parts() {
  const uint64_t sequence = scope.op.sequence;
  OpSlot& slot = transport.slot(rank, sequence);
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
  const uint64_t sequence = scope.op.sequence;
  auto there = [this](int p) { return published(p); };
  transport.notify_if_last(there);
  transport.wait_all(there, scope);
  matched_ = true;
  const OpSlot& mine = transport.slot(rank, sequence);
  for (int p = 0; p < world_size; ++p) {
    const OpSlot& other = transport.slot(p, sequence);
    if (other.key.load(std::memory_order_relaxed) != mine.key.load(std::memory_order_relaxed) || other.count != mine.count ||
        other.extra != mine.extra)
      compare(p);
  }
  if (op.kind == OpKind::all_to_all && op.uneven) compare_splits();
}

// Names the first field that differs. Every rank compares with every other, so every rank raises.
void Call::compare(int peer) const {
  const OpSlot& other = transport.slot(peer, scope.op.sequence);
  const uint64_t key = other.key.load(std::memory_order_relaxed);
  auto differ = [&](const std::string& field, const std::string& here, const std::string& there, const char* rule) {
    transport.raise(ErrorKind::mismatch, scope.op, peer,
                    field + "=" + here + " here, " + there + " on rank " + std::to_string(peer) + ". " + rule);
  };
  const auto kind = static_cast<OpKind>(key >> 27 & 31);
  const auto dtype = static_cast<DType>(key >> 22 & 31);
  const auto reduce_op = static_cast<ReduceOp>(key >> 18 & 15);
  const auto algorithm = static_cast<Algorithm>(key >> 14 & 15);
  const int root = static_cast<int>(key & 16383);
  if (kind != op.kind)
    differ("operation", to_string(op.kind), to_string(kind), "All ranks must call the same operations in the same order.");
  if (dtype != op.dtype) differ("dtype", to_string(op.dtype), to_string(dtype), "All ranks must pass equal dtypes.");
  if (reduce_op != op.reduce_op)
    differ("reduce op", to_string(op.reduce_op), to_string(reduce_op), "All ranks must pass the same reduce op.");
  if (root != op.root) differ("root", std::to_string(op.root), std::to_string(root), "All ranks must name the same root.");
  if (other.count != op.count) differ("count", std::to_string(op.count), std::to_string(other.count), "All ranks must pass equal sizes.");
  if (algorithm != op.algorithm)
    differ("algorithm", to_string(op.algorithm), to_string(algorithm), "All ranks must ask for the same algorithm.");
  auto number = [](uint64_t bits) {
    std::ostringstream text;
    text << std::bit_cast<double>(bits);
    return text.str();
  };
  if (op.reduce_op == ReduceOp::premul_sum && !op.uneven)
    differ("premul_sum factor", number(extra()), number(other.extra), "All ranks must pass the same factor.");
  transport.raise(ErrorKind::mismatch, scope.op, peer,
                  "the list of sizes differs from that of rank " + std::to_string(peer) + ". All ranks must pass the same list.");
}

// Every rank reads all n*n sizes, so all come to the same verdict.
void Call::compare_splits() const {
  for (int src = 0; src < world_size; ++src)
    for (int dst = 0; dst < world_size; ++dst) {
      size_t sent = peer_part(src, false, dst).nbytes / item, expected = peer_part(dst, true, src).nbytes / item;
      if (sent == expected) continue;
      int other = src == rank ? dst : src;
      transport.raise(ErrorKind::mismatch, scope.op, other,
                      "rank " + std::to_string(src) + " sends " + std::to_string(sent) + " elements to rank " + std::to_string(dst) +
                          ", which expects " + std::to_string(expected) +
                          ". in_splits[dst] of the sender must equal out_splits[src] of the receiver.");
    }
}

size_t Call::longest_pair() {
  match();
  size_t longest = 0;
  for (int src = 0; src < world_size; ++src)
    for (int dst = 0; dst < world_size; ++dst) longest = std::max<size_t>(longest, peer_part(src, false, dst).nbytes);
  return longest;
}

const std::byte* Call::payload(int peer, size_t offset) const {
  const OpSlot& slot = transport.slot(peer, scope.op.sequence);
  size_t total = op.nbytes();
  if (op.uneven && op.kind == OpKind::all_to_all) {
    total = 0;
    for (int p = 0; p < world_size; ++p) total += peer_part(peer, false, p).nbytes;
  } else if (op.uneven && op.kind == OpKind::all_gather) {
    total = op.out_parts[peer].count * item;
  } else if (op.uneven && op.kind == OpKind::reduce_scatter) {
    total = 0;
    for (const Part& part : op.in_parts) total += part.count * item;
  } else if (op.kind == OpKind::reduce_scatter || op.kind == OpKind::all_to_all || op.kind == OpKind::scatter) {
    total *= world_size;
  }
  return (total <= inline_bytes ? slot.inline_payload : slot.payload) + offset;
}

std::byte* Call::mapped(int peer, bool output, int part) const {
  const OpSlot& slot = transport.slot(peer, scope.op.sequence);
  return transport.map_address(peer, peer_part(peer, output, part).address, output ? slot.out_region : slot.in_region);
}

void Call::fetch(int peer, int part, size_t offset, void* to, size_t nbytes) const {
  if (nbytes == 0) return;
  if (const std::byte* from = mapped(peer, false, part)) std::memcpy(to, from + offset, nbytes);
  else transport.read_peer(peer, reinterpret_cast<const std::byte*>(peer_part(peer, false, part).address) + offset, to, nbytes, scope.op);
}

void Call::put(int peer, int part, size_t offset, const void* from, size_t nbytes) const {
  if (nbytes == 0) return;
  if (std::byte* to = mapped(peer, true, part)) std::memcpy(to + offset, from, nbytes);
  else transport.write_peer(peer, reinterpret_cast<std::byte*>(peer_part(peer, true, part).address) + offset, from, nbytes, scope.op);
}

bool Call::registered(int peer) const {
  const OpSlot& slot = transport.slot(peer, scope.op.sequence);
  return slot.in_region != 0 && slot.out_region != 0;
}

bool Call::all_mapped() const {
  if (transport.reach() == Transport::Reach::pointer) return true;
  for (int p = 0; p < world_size; ++p)
    if (!registered(p)) return false;
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
  reduce(op.dtype, op.reduce_op, sources, world_size, out, count, op.reduce_op == ReduceOp::avg ? world_size : op.factor);
}

}  // namespace pycomm
