// ranks_on_fibers.h -- a group of ranks whose plans run on the fiber machine: arenas, buffers and one stream
// per rank.
//
// What cuda/issue.cc does with a plan on a GPU, this does on a Machine: launches become fiber launches,
// exchanges and half-turns become stream memory operations on the same words (sync_words.h), copies by the
// copy engine become host functions.
#pragma once

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../../csrc/cuda/kernels/session.cuh"
#include "../../../csrc/cuda/plan.h"
#include "../../../csrc/cuda/sync_words.h"
#include "kernel_launch.h"

namespace pycomm::cuda::testing {

using fiber::Machine;
using fiber::Outcome;
using fiber::Stream;

// Zeroed, page-aligned memory with a guard of 0xEE on either side.
class Buffer {
 public:
  explicit Buffer(size_t nbytes, size_t misalign = 0) : nbytes_(nbytes) {
    const size_t whole = round_up_to(nbytes + misalign + 2 * guard, 4096);
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, whole)));
    std::memset(memory_.get(), 0xEE, whole);
    data_ = memory_.get() + guard + misalign;
    std::memset(data_, 0, nbytes);
  }
  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  bool guards_intact() const {
    for (size_t i = 0; i < guard; ++i)
      if (data_[nbytes_ + i] != std::byte{0xEE} || data_[-1 - static_cast<ptrdiff_t>(i)] != std::byte{0xEE})
        return false;
    return true;
  }

 private:
  static constexpr size_t guard = 256;
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::byte* data_;
  size_t nbytes_;
};

struct RanksOptions {
  Protocol protocol = Protocol::resident;
  bool pointers = true;             // buffers of peers are addressable
  int blocks = 2, threads = 64;     // of every launch at most; fewer threads than on a GPU
  size_t staging_bytes = 64 << 10;
  // Not 0: a segment in the fullest staging has so many times 128 bytes, less than arena_shape() allows.
  size_t unit = 0;
  uint64_t timeout_ns = 1'000'000'000;
};

// One region of registered memory: the same offset on every rank.
struct Region {
  std::vector<std::unique_ptr<Buffer>> parts;  // by rank
};

class Ranks {
 public:
  Ranks(Machine& machine, int world_size, const RanksOptions& options)
      : machine_(machine), n_(world_size), options_(options) {
    const ArenaShape arena = arena_shape(n_, options.staging_bytes);
    for (int r = 0; r < n_; ++r) {
      arenas_.push_back(std::make_unique<Buffer>(arena.nbytes));
      errors_.push_back(std::make_unique<ErrorWord>());
      machine.name_range(arenas_[r]->data(), arena.nbytes, "arena " + std::to_string(r));
    }
    words_.assign(sync_words(n_), 0);
    syncs_.assign(n_, 0);
    bases_.assign(max_regions * max_ranks, 0);
    for (int r = 0; r < n_; ++r) {
      Shape shape;
      shape.group.rank = r;
      shape.group.world_size = n_;
      for (int p = 0; p < n_; ++p) shape.group.arena[p] = arenas_[p]->data();
      shape.group.regions = bases_.data();
      shape.group.error = errors_[r].get();
      shape.group.words_bytes = arena.words_bytes;
      shape.group.staging_offset = arena.staging_offset;
      shape.group.half_bytes =
          options.unit ? (n_ + 1) * options.blocks * options.unit * align_bytes : arena.half_bytes;
      shape.group.message_offset = arena.message_offset;
      shape.group.message_bytes = arena.message_bytes;
      shape.protocol = options.protocol;
      shape.blocks = options.blocks;
      shape.pointers = options.pointers;
      shapes_.push_back(shape);
    }
  }

  int world_size() const { return n_; }
  Machine& machine() { return machine_; }
  const Shape& shape(int rank) const { return shapes_[rank]; }
  Shape& shape(int rank) { return shapes_[rank]; }
  ErrorWord& error(int rank) { return *errors_[rank]; }

  // Registered memory on all ranks; `multicast` also through one address for all.
  Region& add_region(size_t nbytes, bool multicast = false) {
    auto region = std::make_unique<Region>();
    const size_t id = regions_.size();
    std::vector<std::byte*> members;
    for (int r = 0; r < n_; ++r) {
      region->parts.push_back(std::make_unique<Buffer>(nbytes));
      members.push_back(region->parts[r]->data());
      bases_[id * max_ranks + r] = reinterpret_cast<uint64_t>(members[r]);
    }
    if (multicast) {
      multicasts_[id] = std::make_unique<Buffer>(nbytes);  // an address range that nothing else uses
      machine_.add_multicast(multicasts_[id]->data(), nbytes, members);
      for (Shape& shape : shapes_) shape.multicast = true;
    }
    regions_.push_back(std::move(region));
    return *regions_.back();
  }

  BufferLookup buffers(int rank) {
    BufferLookup buffers;
    buffers.handle = [this, rank](const void* data, size_t nbytes) -> std::optional<uint64_t> {
      size_t offset = 0;
      const int id = find(rank, data, nbytes, offset);
      if (id < 0) return std::nullopt;
      return handle_of_region(id, offset);
    };
    buffers.multicast = [this, rank](const void* data) -> std::byte* {
      size_t offset = 0;
      const int id = find(rank, data, 1, offset);
      return id >= 0 && multicasts_.count(id) ? multicasts_[id]->data() + offset : nullptr;
    };
    buffers.at_peer = [this, rank](const void* data, int peer) -> std::byte* {
      size_t offset = 0;
      const int id = find(rank, data, 1, offset);
      return id >= 0 ? regions_[id]->parts[peer]->data() + offset : nullptr;
    };
    return buffers;
  }

  // Enqueues a collective of one rank; returns its plan.
  LaunchPlan enqueue(int rank, const Op& op, int stream = 0) {
    LaunchPlan planned = plan_collective(op, shapes_[rank], buffers(rank), options_.timeout_ns);
    syncs_[rank] += enqueue(rank, planned, stream, syncs_[rank]);
    return planned;
  }
  void enqueue(int rank, const MessageCall& message, int stream) {
    enqueue(rank, plan_message(message, shapes_[rank], buffers(rank), options_.timeout_ns), stream, 0,
            message.sends);
  }

  // The plan of the last collective of this rank once more, as a graph replays it: with the sets of words
  // that its exchanges had.
  void replay(int rank, const LaunchPlan& planned, int stream = 0) {
    size_t exchanges = 0;
    for (const Step& step : planned.steps) exchanges += step.what == Step::What::sync;
    enqueue(rank, planned, stream, syncs_[rank] - exchanges);
  }

  // Nothing was reported and no guard was touched on any rank.
  void check_quiet() const {
    for (int r = 0; r < n_; ++r)
      for (const ErrorRecord& record : errors_[r]->records)
        if (record.fault)
          throw std::runtime_error("rank " + std::to_string(r) + " reported fault " +
                                   std::to_string(record.fault));
    for (const auto& arena : arenas_)
      if (!arena->guards_intact()) throw std::runtime_error("a write beyond an arena");
  }

 private:
  static constexpr size_t max_regions = 8;

  // Returns the number of exchanges; the first has the number `exchange`.
  size_t enqueue(int rank, const LaunchPlan& planned, int stream_index, uint64_t exchange,
                 bool sends = false) {
    Stream& stream = machine_.stream(rank, stream_index);
    const uint64_t first = exchange;
    for (const Step& step : planned.steps) switch (step.what) {
        case Step::What::launch: launch_step(machine_, stream, step, options_.threads); break;
        case Step::What::copy:
          machine_.host(stream, [step] { std::memcpy(step.to, step.from, step.nbytes); });
          break;
        case Step::What::sync: apply(stream, exchange_of(rank, n_, exchange++)); break;
        case Step::What::post: apply(stream, {half_turn(rank, step.peer, n_, sends)}); break;
        case Step::What::await: apply(stream, half_turn_awaited(rank, step.peer, n_, sends)); break;
      }
    return exchange - first;
  }

  void apply(Stream& stream, const std::vector<WordOperation>& operations) {
    for (const WordOperation& operation : operations) {
      uint32_t* word = &words_[operation.word];
      if (operation.waits) machine_.wait_value(stream, word, operation.value);
      else machine_.write_value(stream, word, operation.value);
    }
  }

  int find(int rank, const void* data, size_t nbytes, size_t& offset) const {
    const auto* p = static_cast<const std::byte*>(data);
    for (size_t id = 0; id < regions_.size(); ++id) {
      const Buffer& part = *regions_[id]->parts[rank];
      if (p < part.data() || p + nbytes > part.data() + part.nbytes()) continue;
      offset = p - part.data();
      return static_cast<int>(id);
    }
    return -1;
  }

  Machine& machine_;
  const int n_;
  const RanksOptions options_;
  std::vector<std::unique_ptr<Buffer>> arenas_;
  std::vector<std::unique_ptr<ErrorWord>> errors_;
  std::vector<Shape> shapes_;
  std::vector<uint32_t> words_;
  std::vector<uint64_t> syncs_, bases_;
  std::vector<std::unique_ptr<Region>> regions_;
  std::map<size_t, std::unique_ptr<Buffer>> multicasts_;
};

}  // namespace pycomm::cuda::testing
