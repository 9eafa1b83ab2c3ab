// tuned.h -- the choices that were measured on this machine, as all ranks of a group hold them.
//
// `python -m pycomm.benchmarks tune` writes a file (pycomm/tuned.py), and every process reads it when it
// makes a group. All ranks must choose alike, though their files may differ: another home folder, a file
// replaced while the ranks start. So in a group only what rank 0 has read counts:
//
//   rank 0   creates the group's memory, writes the rows for this number of ranks and cores into it, and
//            only then hands out the descriptor (transport/join.cc)
//   others   map that memory; the table is complete before they can see it, and never changes again
//
// No rank reads a file later, and an operation reads the table where it lies: one cache line or two. An empty
// table (no file, no figures for this group) leaves every choice to select.cc. Decision 0014.
#pragma once

#include <string>
#include <vector>

#include "../op/op.h"
#include "../transport/transport.h"

namespace pycomm {

// How the ranks of a group get at the buffers of an operation.
enum class Access : uint8_t { staging, kernel, mapped };
inline constexpr int num_accesses = 3;

inline const char* to_string(Access access) {
  constexpr const char* names[num_accesses] = {"staging", "kernel", "mapped"};
  int i = static_cast<int>(access);
  return i < num_accesses ? names[i] : "?";
}

// A line of the file: up to `until` bytes of a rank's whole buffer (and above the line before it) this
// algorithm is taken by groups of so many ranks on so many cores.
struct TunedRow {
  int ranks, cores;
  Access access;
  OpKind kind;
  size_t until;
  Algorithm algorithm;
};

// The rows of one group. Lies in memory that processes share, where zeros are an empty table.
class TunedTable {
 public:
  static constexpr int most_ranges = 8;
  static constexpr int last_kind = static_cast<int>(OpKind::scatter);

  // automatic: the table does not say.
  Algorithm find(OpKind kind, Access access, size_t nbytes) const {
    const Line& line = lines_[static_cast<int>(access)][static_cast<int>(kind)];
    for (uint32_t i = 0; i < line.count; ++i)
      if (nbytes <= line.until[i]) return line.algorithms[i];
    return Algorithm::automatic;
  }
  bool empty() const { return !filled_; }

  // What `rows`, which check_rows() has seen, have for such a group.
  static TunedTable of(const std::vector<TunedRow>& rows, int world_size, int cores);

 private:
  struct Line {
    uint32_t count;
    Algorithm algorithms[most_ranges];
    uint64_t until[most_ranges];
  };

  bool filled_;
  Line lines_[num_accesses][last_kind + 1];
};

// Throws std::invalid_argument where a row cannot be carried out or rows are not in order.
void check_rows(const std::vector<TunedRow>& rows);

// TransportOptions::write_note, and what it has written.
std::function<void(int, int, std::byte*)> note_of(std::vector<TunedRow> rows);
inline const TunedTable& tuned_table(const Transport& transport) {
  return *reinterpret_cast<const TunedTable*>(transport.note());
}

}  // namespace pycomm
