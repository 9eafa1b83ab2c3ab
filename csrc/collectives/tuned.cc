// tuned.cc -- see tuned.h.
#include "tuned.h"

#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "select.h"

namespace pycomm {

static_assert(std::is_trivially_copyable_v<TunedTable> && sizeof(TunedTable) <= note_bytes);

TunedTable TunedTable::of(const std::vector<TunedRow>& rows, int world_size, int cores) {
  TunedTable table{};
  for (const TunedRow& row : rows) {
    if (row.ranks != world_size || row.cores != cores) continue;
    Line& line = table.lines_[static_cast<int>(row.access)][static_cast<int>(row.kind)];
    line.until[line.count] = row.until;
    line.algorithms[line.count] = row.algorithm;
    ++line.count;
    table.filled_ = true;
  }
  return table;
}

std::function<void(int, int, std::byte*)> note_of(std::vector<TunedRow> rows) {
  return [rows = std::move(rows)](int world_size, int cores, std::byte* note) {
    const TunedTable table = TunedTable::of(rows, world_size, cores);
    std::memcpy(note, &table, sizeof(table));
  };
}

namespace {

bool same_line(const TunedRow& a, const TunedRow& b) {
  return a.ranks == b.ranks && a.cores == b.cores && a.access == b.access && a.kind == b.kind;
}

// What a group may take unasked: not the ring for sums, whose last bits differ from those of all others.
bool allowed(const TunedRow& row) {
  const bool reduces =
      row.kind == OpKind::all_reduce || row.kind == OpKind::reduce || row.kind == OpKind::reduce_scatter;
  if (row.kind == OpKind::none || static_cast<int>(row.kind) > TunedTable::last_kind) return false;
  if (row.algorithm == Algorithm::automatic || !has_algorithm(row.kind, row.algorithm)) return false;
  if (row.algorithm == Algorithm::ring && reduces) return false;
  return row.algorithm != Algorithm::direct || row.access != Access::staging;
}

}  // namespace

void check_rows(const std::vector<TunedRow>& rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const TunedRow& row = rows[i];
    const std::string what = std::string(to_string(row.kind)) + " on " + std::to_string(row.ranks) +
                             " ranks, " + to_string(row.access) + ": ";
    if (!allowed(row))
      throw std::invalid_argument(what + "the algorithm " + to_string(row.algorithm) + " cannot be taken");
    int before = 0;
    for (size_t k = 0; k < i; ++k) {
      if (!same_line(rows[k], row)) continue;
      ++before;
      if (rows[k].until >= row.until)
        throw std::invalid_argument(what + std::to_string(row.until) + " bytes follow " +
                                    std::to_string(rows[k].until) + ", they must grow");
    }
    if (before >= TunedTable::most_ranges)
      throw std::invalid_argument(what + "more than " + std::to_string(TunedTable::most_ranges) + " ranges");
  }
}

}  // namespace pycomm
