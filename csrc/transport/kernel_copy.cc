// kernel_copy.cc -- see kernel_copy.h.
#include "kernel_copy.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

namespace pycomm {

namespace {

constexpr size_t sample = 64 << 10;
constexpr int runs = 5;  // the fastest counts: what disturbs a run makes it slower
constexpr double fast = 3;

template <class Copy>
double seconds_of(const Copy& copy) {
  double least = 1;
  for (int run = 0; run < runs; ++run) {
    const auto start = std::chrono::steady_clock::now();
    copy();
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return least;
}

}  // namespace

bool kernel_copies_fast() {
  std::vector<std::byte> from(sample), to(sample);
  bool works = true;
  const double by_kernel = seconds_of([&] {
    const iovec local{to.data(), sample}, remote{from.data(), sample};
    works &= ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) == static_cast<ssize_t>(sample);
  });
  const double by_memcpy = seconds_of([&] {
    std::memcpy(to.data(), from.data(), sample);
    asm volatile("" : : "r"(to.data()) : "memory");
  });
  return works && by_kernel < fast * by_memcpy;
}

}  // namespace pycomm
