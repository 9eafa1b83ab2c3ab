// counters.h -- how much a group has done: operations, bytes and seconds, by operation and size.
//
// Operations and bytes are always counted, two additions each; seconds only of those operations that were
// measured (times.h), whose number is counted, too. A cell has one writer at a time, and any reader.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

#include "../types.h"
#include "times.h"

namespace pycomm::trace {

// Sizes up to 64, 1K, 16K, 256K, 4M, 64M, and above.
inline constexpr int num_size_classes = 7;
inline constexpr uint64_t first_size_class = 64;

inline int size_class(uint64_t nbytes) {
  if (nbytes <= first_size_class) return 0;
  const int bits = static_cast<int>(std::bit_width(nbytes - 1)) - 6;  // 1 for 65 to 128
  return bits > 20 ? num_size_classes - 1 : (bits + 3) / 4;
}

struct Cell {
  std::atomic<uint64_t> operations{0}, nbytes{0}, measured{0}, waiting_ns{0}, moving_ns{0};
};

class Counters {
 public:
  // By the one who runs the operations of the group.
  void count(OpKind kind, uint64_t nbytes) {
    Cell& cell = cell_of(kind, nbytes);
    add(cell.operations, 1);
    add(cell.nbytes, nbytes);
  }
  void measure(OpKind kind, uint64_t nbytes, const Times& times) {
    Cell& cell = cell_of(kind, nbytes);
    const uint64_t moves = times.arrived ? times.arrived : times.begun;
    add(cell.measured, 1);
    add(cell.waiting_ns, moves - times.begun);
    add(cell.moving_ns, times.ended - moves);
  }
  // By anybody.
  void count_shared(OpKind kind, uint64_t nbytes) {
    Cell& cell = cell_of(kind, nbytes);
    cell.operations.fetch_add(1, std::memory_order_relaxed);
    cell.nbytes.fetch_add(nbytes, std::memory_order_relaxed);
  }
  void measure_shared(OpKind kind, uint64_t nbytes, const Times& times) {
    Cell& cell = cell_of(kind, nbytes);
    const uint64_t moves = times.arrived ? times.arrived : times.begun;
    cell.measured.fetch_add(1, std::memory_order_relaxed);
    cell.waiting_ns.fetch_add(moves - times.begun, std::memory_order_relaxed);
    cell.moving_ns.fetch_add(times.ended - moves, std::memory_order_relaxed);
  }
  const Cell& cell(int kind, int size) const { return cells_[kind][size]; }

 private:
  Cell& cell_of(OpKind kind, uint64_t nbytes) { return cells_[static_cast<int>(kind)][size_class(nbytes)]; }
  static void add(std::atomic<uint64_t>& counter, uint64_t n) {
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }

  std::array<std::array<Cell, num_size_classes>, num_op_kinds> cells_{};
};

}  // namespace pycomm::trace
