// weak_ctx.h -- the context of ctx.cuh once more, with a memory weaker than that of x86 and of the fibers.
//
// On a GPU a relaxed store becomes visible some time later, in no order with the thread's other stores but
// those to the same word, and a relaxed load may return what a word held before. x86 shows neither, and to
// ThreadSanitizer every atomic access is right. So here
//
//   relaxed stores    wait in a buffer of the thread. They leave it one by one, in random order, at random
//                     moments; all of them before a release, an atomic addition, a barrier of the block, a
//                     pause in a waiting loop and the end of the kernel
//   relaxed loads     return the newest value or an older one: none that this thread has seen replaced, and
//                     none that was replaced before something this thread has acquired was released
//   acquire, release  order what went before, as their names say; their own words are never old
//
// One clock counts the stores as they reach memory, so an acquire also brings what other threads had stored
// by then: stronger than a GPU, which orders only what the releasing thread had seen. A barrier brings
// everything. So what is found is wrong; what is not found may be wrong all the same. Plain accesses are
// those of the fibers: races on them are ThreadSanitizer's matter.
//
// A wait looks at a word again and again, and a word is not old for ever: after two pauses without success a
// thread reads what is newest.
#pragma once

#include <unordered_map>
#include <utility>
#include <vector>

#include "fiber.h"

namespace pycomm::cuda::testing {

// Of all fibers: they run in one OS thread.
class WeakMemory {
 public:
  static WeakMemory& instance() {
    static WeakMemory memory;
    return memory;
  }

  uint64_t now() const { return now_; }
  uint64_t random(uint64_t n) {
    random_ = random_ * 6364136223846793005 + 1442695040888963407;
    return (random_ >> 33) % n;
  }

  // After `value` was stored where `before` had been.
  void note(const uint64_t* word, uint64_t before, uint64_t value) {
    History& history = histories_[word];
    if (history.empty() || history.back().second != before) history = {{0, before}};
    history.emplace_back(++now_, value);
    if (history.size() > longest) history.erase(history.begin());
  }

  // The newest value is `value`; returns that or one of those before it, none of them older than the one that
  // was the newest at time `since`; and when it was stored.
  std::pair<uint64_t, uint64_t> choose(const uint64_t* word, uint64_t value, uint64_t since, bool newest) {
    const auto found = histories_.find(word);
    if (found == histories_.end() || found->second.back().second != value) return {0, value};
    const History& history = found->second;
    size_t oldest = history.size() - 1;
    while (oldest > 0 && history[oldest].first > since) --oldest;
    if (newest || random(2)) return history.back();
    return history[oldest + random(history.size() - oldest)];
  }

 private:
  using History = std::vector<std::pair<uint64_t, uint64_t>>;  // (time, value)
  static constexpr size_t longest = 4;
  std::unordered_map<const uint64_t*, History> histories_;
  uint64_t now_ = 1, random_ = 1;
};

class WeakCtx {
 public:
  static constexpr uint32_t polls = fiber::FiberCtx::polls;

  explicit WeakCtx(fiber::FiberCtx& c) : c_(c), since_(memory_.now()) {}
  WeakCtx(const WeakCtx&) = delete;

  int thread() const { return c_.thread(); }
  int threads() const { return c_.threads(); }
  int block() const { return c_.block(); }
  int blocks() const { return c_.blocks(); }

  void sync() { sync_or(false); }
  bool sync_or(bool flag) {
    drain();
    const bool result = c_.sync_or(flag);
    since_ = memory_.now();
    return result;
  }
  uint64_t shuffle(uint64_t value, int lane) { return c_.shuffle(value, lane); }
  template <class T>
  T& shared() {
    return c_.shared<T>();
  }

  U4 ld16(const void* p) { return c_.ld16(p); }
  void st16(void* p, U4 v) { c_.st16(p, v); }
  template <class T>
  T ld(const T* p) {
    return c_.ld(p);
  }
  template <class T>
  void st(T* p, T v) {
    c_.st(p, v);
  }

  U4 ld_words(const void* p) {
    auto* words = static_cast<const uint64_t*>(p);
    const bool swap = memory_.random(2);  // in either order
    uint64_t both[2];
    for (int i : {0, 1}) both[i ^ swap] = load_relaxed(&words[i ^ swap], Scope::system);
    return {static_cast<uint32_t>(both[0]), static_cast<uint32_t>(both[0] >> 32),
            static_cast<uint32_t>(both[1]), static_cast<uint32_t>(both[1] >> 32)};
  }
  void st_words(void* p, U4 v) {
    auto* words = static_cast<uint64_t*>(p);
    store_relaxed(&words[0], v.x | static_cast<uint64_t>(v.y) << 32, Scope::system);
    store_relaxed(&words[1], v.z | static_cast<uint64_t>(v.w) << 32, Scope::system);
  }

  uint64_t load_relaxed(const uint64_t* p, Scope scope) {
    for (size_t i = buffer_.size(); i-- > 0;)
      if (buffer_[i].first == p) return buffer_[i].second;
    const uint64_t newest = c_.load_relaxed(p, scope);
    uint64_t& seen = seen_[p];
    const auto [time, value] = memory_.choose(p, newest, std::max(since_, seen), pauses_ >= 2);
    seen = std::max(seen, time);
    return value;
  }
  uint64_t load_acquire(const uint64_t* p, Scope scope) {
    const uint64_t value = c_.load_acquire(p, scope);
    const uint64_t time = memory_.choose(p, value, 0, true).first;
    since_ = std::max(since_, time ? time : memory_.now());
    return value;
  }
  void store_relaxed(uint64_t* p, uint64_t v, Scope) {
    pauses_ = 0;
    buffer_.emplace_back(p, v);
    if (memory_.random(8) == 0) drain_one();
  }
  void store_release(uint64_t* p, uint64_t v, Scope scope) {
    pauses_ = 0;
    drain();
    const uint64_t before = __atomic_load_n(p, __ATOMIC_RELAXED);
    c_.store_release(p, v, scope);
    memory_.note(p, before, v);
  }
  uint64_t add(uint64_t* p, uint64_t n, Scope scope) {
    drain();
    const uint64_t before = c_.add(p, n, scope);
    memory_.note(p, before, before + n);
    since_ = memory_.now();
    return before;
  }

  void relax(const void* word) {
    drain();
    ++pauses_;
    c_.relax(word);
  }
  uint64_t now_ns() { return c_.now_ns(); }
  template <class T>
  U4 multimem_reduce(const void* p) {
    return c_.multimem_reduce<T>(p);
  }
  void multimem_store(void* p, U4 v) { c_.multimem_store(p, v); }

  // At the end of the kernel, and before each thing that orders. Other fibers may run in between.
  void drain() {
    while (!buffer_.empty()) drain_one();
  }

 private:
  void drain_one() {
    uint64_t* const word = buffer_[memory_.random(buffer_.size())].first;
    size_t i = 0;  // the first of this word
    while (buffer_[i].first != word) ++i;
    const uint64_t value = buffer_[i].second;
    buffer_.erase(buffer_.begin() + static_cast<std::ptrdiff_t>(i));
    const uint64_t before = __atomic_load_n(word, __ATOMIC_RELAXED);
    c_.store_relaxed(word, value, Scope::system);
    memory_.note(word, before, value);
  }

  fiber::FiberCtx& c_;
  WeakMemory& memory_ = WeakMemory::instance();
  uint64_t since_;  // nothing that was replaced by then is read any more
  int pauses_ = 0;
  std::vector<std::pair<uint64_t*, uint64_t>> buffer_;
  std::unordered_map<const uint64_t*, uint64_t> seen_;  // when the last value read was stored
};

}  // namespace pycomm::cuda::testing
