// kernel_copy_test.cc -- how often a rank asks the kernel about its own memory, and with what it measures the
// kernel's copies. The program has its own process_vm_readv, which counts and notes its arguments.
#include "../../csrc/transport/kernel_copy.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

using namespace pycomm;

namespace {

int passed = 0, failed = 0;
int reads = 0;
std::set<uintptr_t> distances;  // from source to target, within a page

void check(bool right, const std::string& what) {
  ++(right ? passed : failed);
  if (!right) std::printf("WRONG %s\n", what.c_str());
}

struct Memory {
  explicit Memory(size_t nbytes) : nbytes(nbytes) {
    data = static_cast<std::byte*>(
        ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    check(data != MAP_FAILED, "mmap");
  }
  ~Memory() { ::munmap(data, nbytes); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data;
  size_t nbytes;
};

template <class Body>
int reads_of(const Body& body) {
  const int before = reads;
  body();
  return reads - before;
}

// Runs the body in a new thread, whose table of known buffers is empty.
template <class Body>
void in_new_thread(const Body& body) {
  std::thread(body).join();
}

// The parts of an operation: inputs and outputs for each rank, whatever power of two apart.
void parts_apart() {
  for (int ranks : {2, 3, 8, 64}) {
    for (size_t apart = 4 << 10; apart <= 16 << 20; apart *= 2) {
      const Memory in(ranks * apart), out(ranks * apart);
      auto ask = [&] {
        for (int rank = 0; rank < ranks; ++rank)
          for (const Memory* memory : {&in, &out})
            check(kernel_reaches(memory->data + rank * apart, apart), "a part is reached");
      };
      in_new_thread([&] {
        const std::string what = std::to_string(ranks) + " ranks, " + std::to_string(apart) + " apart";
        check(reads_of(ask) == 2 * ranks, "a look at each new part: " + what);
        check(reads_of(ask) == 0, "no look at a known one: " + what);
      });
    }
  }
}

// The gradients of a model, one after the other, step for step. A set of the table may overflow by chance.
void many_buffers() {
  std::vector<std::unique_ptr<Memory>> all;
  for (size_t n = 1; n <= 300; ++n) all.push_back(std::make_unique<Memory>(n * 3000));
  in_new_thread([&] {
    auto ask = [&] {
      for (const auto& one : all) check(kernel_reaches(one->data, one->nbytes), "a buffer is reached");
    };
    check(reads_of(ask) == 300, "a look at each of 300");
    check(reads_of(ask) < 30, "they are known in the next step");
  });
}

void what_is_known() {
  in_new_thread([] {
    const Memory memory(1 << 20);
    auto asks = [&](size_t nbytes) { return reads_of([&] { kernel_reaches(memory.data, nbytes); }); };
    check(asks(4096) == 1 && asks(4096) == 0 && asks(100) == 0, "a smaller one at the same place is known");
    check(asks(8192) == 1 && asks(8192) == 0 && asks(4096) == 0, "a larger one is not");
    check(asks(4096) == 0, "both from now on");
  });
  in_new_thread([] {
    Memory memory(3 * 4096);
    ::mprotect(memory.data + 2 * 4096, 4096, PROT_NONE);
    for (int again = 0; again < 2; ++again) {
      check(!kernel_reaches(memory.data, 3 * 4096), "the last page is out of reach");
      check(!kernel_reaches(memory.data + 2 * 4096, 1), "alone, too");
      check(kernel_reaches(memory.data, 2 * 4096), "those before it are not");
    }
    ::mprotect(memory.data + 2 * 4096, 4096, PROT_READ);
    check(kernel_reaches(memory.data, 3 * 4096), "what was out of reach is asked again");
  });
}

// What lies on the heap must not decide where the measure copies from and to.
void measure_and_heap() {
  std::vector<std::vector<char>> heap;
  distances.clear();
  for (size_t round = 0; round < 40; ++round) {
    kernel_copies_fast();
    for (size_t n = 0; n < 5; ++n) heap.emplace_back(1000 * (5 * round + n) + 16);
  }
  check(distances.size() == 1, "one distance, not " + std::to_string(distances.size()));
  for (uintptr_t distance : distances)
    check(64 <= distance && distance <= 4096 - 64, "away from a page's ends");
}

}  // namespace

extern "C" ssize_t process_vm_readv(pid_t pid, const iovec* local, unsigned long locals, const iovec* remote,
                                    unsigned long remotes, unsigned long flags) {
  if (pid == ::getpid()) ++reads;
  distances.insert(
      (reinterpret_cast<uintptr_t>(local->iov_base) - reinterpret_cast<uintptr_t>(remote->iov_base)) % 4096);
  return ::syscall(SYS_process_vm_readv, pid, local, locals, remote, remotes, flags);
}

int main() {
  parts_apart();
  many_buffers();
  what_is_known();
  measure_and_heap();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
