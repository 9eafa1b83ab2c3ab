// kernel_copy.cc -- see kernel_copy.h.
#include "kernel_copy.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
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

bool kernel_admits_peers() { return ::prctl(PR_GET_DUMPABLE) == 1; }

bool kernel_reaches(const void* data, size_t nbytes) {
  struct Seen {
    const void* data = nullptr;
    size_t nbytes = 0;
  };
  thread_local Seen recent[8];
  Seen& seen = recent[reinterpret_cast<uintptr_t>(data) / 4096 % std::size(recent)];
  if (seen.data == data && seen.nbytes >= nbytes) return true;
  std::byte bytes[2];
  auto* first = static_cast<std::byte*>(const_cast<void*>(data));
  const iovec local{bytes, sizeof(bytes)};
  const iovec remote[] = {{first, 1}, {first + nbytes - 1, 1}};
  if (::process_vm_readv(::getpid(), &local, 1, remote, std::size(remote), 0) != sizeof(bytes)) return false;
  if (::process_vm_writev(::getpid(), nullptr, 0, nullptr, 0, 0) != 0) return false;  // writes nothing
  seen = {data, nbytes};
  return true;
}

}  // namespace pycomm
