// machine.cc -- streams, events and reports on top of the scheduler. Compiled like the kernels.
//
// Everything that a stream does is a launch: a function of the host, and a stream memory operation, is one of
// one thread. An event is a word that counts: record() stores, wait() waits, with the flags that kernels use.
#include <cstdio>
#include <deque>
#include <exception>
#include <map>
#include <stdexcept>
#include <utility>

#include "fiber.h"

namespace pycomm::cuda::fiber {

class Stream {
 public:
  Stream(StreamQueue* stream, int number) : queue(stream), rank(stream->rank), index(number) {}

  StreamQueue* queue;
  int rank, index;
};

namespace {

struct KernelLaunch : Launch {
  Kernel kernel;
  std::string error;  // of an exception
};

// For how many turns a block is held back before its threads run: with random schedules one of 16, so that it
// may start when the others of its launch have ended.
int turns_held(const Fiber* f) {
  const Launch* launch = launch_of(f);
  const uint64_t seed = f->scheduler->options.seed;
  if (!seed || f->scheduler->polling || launch->blocks < 2) return 0;
  uint64_t z = seed ^ (static_cast<uint64_t>(launch->number) << 32 | f->block->index << 8 | f->stream->rank);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return (z >> 33) % 16 ? 0 : 400;
}

void enter(Launch* launch, Fiber* f, uint32_t budget) {
  auto* self = static_cast<KernelLaunch*>(launch);
  for (int turns = turns_held(f); turns > 0; turns--) budget = pass_turn(f);
  FiberCtx context(f, launch, budget);
  try {
    self->kernel(context);
    return;
  } catch (const std::exception& error) {
    self->error = error.what();
  } catch (...) {
    self->error = "an exception of unknown type";
  }
  trap(f, "threw", nullptr, 0);
}

void check_geometry(int blocks, int threads) {
  if (blocks >= 1 && threads >= 1 && threads <= 32 * Block::max_warps) return;
  throw std::invalid_argument("a launch of " + std::to_string(blocks) + " blocks of " +
                              std::to_string(threads) + " threads");
}

struct NamedRange {
  const std::byte* begin;
  size_t bytes;
  std::string name;
};

constexpr int max_lines = 200;

// ---- reports

std::string text_of(uintptr_t address, const std::vector<NamedRange>& ranges) {
  char hex[32];
  std::snprintf(hex, sizeof hex, "%#zx", static_cast<size_t>(address));
  for (const NamedRange& range : ranges) {
    const auto begin = reinterpret_cast<uintptr_t>(range.begin);
    if (address >= begin && address < begin + range.bytes)
      return range.name + " + " + std::to_string(address - begin) + " (" + hex + ")";
  }
  return hex;
}

std::string launch_text(const StreamQueue* stream) {
  const Launch* launch = stream->running;
  return "rank " + std::to_string(stream->rank) +
         (stream->index ? " stream " + std::to_string(stream->index) : "") + " " + launch->what + " #" +
         std::to_string(launch->number);
}

std::string thread_text(const Fiber* f, int last) {
  const std::string thread = last == f->thread
                                 ? " thread " + std::to_string(last)
                                 : " threads " + std::to_string(f->thread) + "-" + std::to_string(last);
  return " block " + std::to_string(f->block->index) + thread;
}

std::string state_text(const Fiber* f, const std::vector<NamedRange>& ranges) {
  const Block* b = f->block;
  switch (f->state) {
    case State::asleep: return "waiting for " + text_of(reinterpret_cast<uintptr_t>(f->word), ranges);
    case State::in_sync:
      return "waiting in sync (" + std::to_string(b->arrived) + " of " + std::to_string(b->live) +
             " threads are there)";
    case State::in_shuffle: {
      const Warp& warp = b->warps[f->thread / 32];
      return "waiting in shuffle (" + std::to_string(warp.arrived) + " of " + std::to_string(warp.lanes) +
             " lanes are there)";
    }
    case State::runnable: return "able to run";
    case State::ended: return "";
  }
  return "";
}

// One line per fiber; neighbours in the same state share one.
std::string waiting_text(const Scheduler* s, const std::vector<NamedRange>& ranges) {
  std::string text;
  int lines = 0;
  for (const StreamQueue* stream = s->streams; stream; stream = stream->next) {
    if (stream->live == 0) continue;
    const int fibers = stream->running->blocks * stream->running->threads;
    for (int i = 0; i < fibers; i++) {
      const Fiber* f = stream->fibers[i];
      const std::string state = state_text(f, ranges);
      if (state.empty()) continue;
      while (i + 1 < fibers && stream->fibers[i + 1]->block == f->block &&
             state_text(stream->fibers[i + 1], ranges) == state)
        i++;
      if (++lines == max_lines) return text + "  ...\n";
      text += "  " + launch_text(stream) + thread_text(f, stream->fibers[i]->thread) + ": " + state + "\n";
    }
  }
  return text;
}

std::string fault_text(const Scheduler* s, const std::vector<NamedRange>& ranges) {
  const Fault& fault = s->fault;
  std::string text =
      launch_text(fault.fiber->stream) + thread_text(fault.fiber, fault.fiber->thread) + ": " + fault.what;
  const std::string& error = static_cast<const KernelLaunch*>(launch_of(fault.fiber))->error;
  if (!error.empty()) return text + ": " + error;
  if (!fault.address) return text + " (" + std::to_string(fault.bytes) + ")";
  text += " at " + text_of(fault.address, ranges);
  if (fault.address % fault.bytes)
    text += ", which is misaligned: it must be a multiple of " + std::to_string(fault.bytes);
  return text;
}

Outcome outcome_of(const Scheduler* s, Ending ending, const std::vector<NamedRange>& ranges) {
  Outcome outcome{ending == Ending::done, ending == Ending::deadlock, "", s->steps};
  if (ending == Ending::deadlock) outcome.text = "DEADLOCK: no thread can run\n" + waiting_text(s, ranges);
  if (ending == Ending::too_many_steps) {
    outcome.text =
        "TOO MANY STEPS: given up after " + std::to_string(s->steps) + "\n" + waiting_text(s, ranges);
  }
  if (ending == Ending::fault) outcome.text = "FAULT: " + fault_text(s, ranges) + "\n";
  return outcome;
}

}  // namespace

// ---- Machine

struct Machine::Impl {
  Scheduler* scheduler;
  std::map<std::pair<int, int>, Stream> streams;
  std::deque<KernelLaunch> launches;  // kept to the end: their addresses are keys
  std::deque<uint64_t> events;  // aligned words, 1 when recorded
  std::deque<std::vector<std::byte*>> members;
  std::vector<Multicast> multicasts;
  std::vector<NamedRange> ranges;
  Outcome last{true, false, "", 0};
};

Machine::Machine(int ranks, const Options& options) : impl_(new Impl) {
  impl_->scheduler = create_scheduler(ranks, options, false);
}

Machine::~Machine() { destroy_scheduler(impl_->scheduler); }

Stream& Machine::stream(int rank, int index) {
  if (rank < 0 || rank >= impl_->scheduler->ranks) throw std::out_of_range("rank " + std::to_string(rank));
  const auto found = impl_->streams.find({rank, index});
  if (found != impl_->streams.end()) return found->second;
  Stream created(create_stream(impl_->scheduler, rank, index), index);
  return impl_->streams.emplace(std::pair(rank, index), created).first->second;
}

void Machine::push(Stream& stream, int blocks, int threads, const char* what, Kernel kernel) {
  check_geometry(blocks, threads);
  KernelLaunch& launch = impl_->launches.emplace_back();
  launch.blocks = blocks;
  launch.threads = threads;
  launch.what = what;
  launch.entry = enter;
  launch.kernel = std::move(kernel);
  enqueue(stream.queue, &launch);
}

void Machine::launch(Stream& stream, int blocks, int threads, Kernel kernel) {
  push(stream, blocks, threads, "kernel", std::move(kernel));
}

void Machine::host(Stream& stream, std::function<void()> function) {
  push(stream, 1, 1, "host", [function = std::move(function)](FiberCtx&) { function(); });
}

void Machine::write_value(Stream& stream, uint32_t* word, uint32_t value) {
  push(stream, 1, 1, "write_value", [=](FiberCtx& c) { c.store_release_word(word, value, Scope::system); });
}

void Machine::wait_value(Stream& stream, const uint32_t* word, uint32_t value) {
  push(stream, 1, 1, "wait_value", [=](FiberCtx& c) {
    while (c.load_acquire_word(word, Scope::system) != value) c.relax(word);
  });
}

Event Machine::record(Stream& stream) {
  uint64_t* word = &impl_->events.emplace_back(0);
  const std::string place =
      std::to_string(stream.rank) + (stream.index ? " stream " + std::to_string(stream.index) : "");
  name_range(word, sizeof *word, "event of rank " + place);
  push(stream, 1, 1, "event record", [=](FiberCtx& c) { c.store_release(word, 1, Scope::system); });
  return {word};
}

void Machine::wait(Stream& stream, Event event) {
  push(stream, 1, 1, "event wait", [=](FiberCtx& c) {
    while (!c.load_acquire(event.word, Scope::system)) c.relax(event.word);
  });
}

void Machine::add_multicast(void* base, size_t bytes, std::vector<std::byte*> members) {
  std::vector<std::byte*>& kept = impl_->members.emplace_back(std::move(members));
  impl_->multicasts.push_back(
      {static_cast<std::byte*>(base), bytes, kept.data(), static_cast<int>(kept.size())});
  impl_->scheduler->multicasts = impl_->multicasts.data();
  impl_->scheduler->num_multicasts = static_cast<int>(impl_->multicasts.size());
}

void Machine::name_range(const void* begin, size_t bytes, std::string name) {
  impl_->ranges.push_back({static_cast<const std::byte*>(begin), bytes, std::move(name)});
}

Outcome Machine::run() {
  if (impl_->last.ok) impl_->last = outcome_of(impl_->scheduler, fiber::run(impl_->scheduler), impl_->ranges);
  return impl_->last;
}

// ---- run_launch

namespace {

// An OS thread keeps its fibers from launch to launch: half a thousand stacks take longer to map than a small
// kernel to run.
struct OwnScheduler {
  Scheduler* scheduler = nullptr;
  ~OwnScheduler() {
    if (scheduler) destroy_scheduler(scheduler);
  }
};
thread_local OwnScheduler own;

}  // namespace

Outcome run_launch(int rank_label, int blocks, int threads, const Kernel& kernel, const Options& options,
                   const std::vector<Multicast>& multicasts) {
  check_geometry(blocks, threads);
  if (!own.scheduler) {
    own.scheduler = create_scheduler(1, options, true);
    create_stream(own.scheduler, rank_label, 0);
  }
  Scheduler* s = own.scheduler;
  s->options = options;
  s->options.max_steps = ~uint64_t{0};  // polling is not counted: others may be slow
  s->random = options.seed;
  s->steps = s->held_until = 0;
  s->multicasts = multicasts.data();
  s->num_multicasts = static_cast<int>(multicasts.size());
  s->streams->rank = rank_label;
  s->streams->last = nullptr;
  KernelLaunch launch;
  launch.blocks = blocks;
  launch.threads = threads;
  launch.what = "kernel";
  launch.entry = enter;
  launch.kernel = kernel;
  enqueue(s->streams, &launch);
  const Outcome outcome = outcome_of(s, run(s), {});
  if (!outcome.ok) {
    destroy_scheduler(s);
    own.scheduler = nullptr;
  }
  return outcome;
}

}  // namespace pycomm::cuda::fiber
