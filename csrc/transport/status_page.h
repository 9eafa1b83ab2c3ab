// status_page.h -- what a process is in, for `python -m pycomm.status`.
//
// Every process has a page of its life file (memory/life.h), at page `byte`, with a row for each of its
// groups. Whoever may open /proc/PID/fd of a process, its own user and root, reads the page there, also of
// one that is stopped or hangs: no thread of it has to answer. A descriptor or a file in some folder would
// have done, too; the life file is there already, is found by its name, and is gone with its processes. Its
// record locks say whose page it is, and that the process lives.
//
// Cost: three relaxed stores per operation into a line that no other process reads. For whom a rank waits is
// written by the looks of a slow wait, every 10 ms. Rows say what is so now and then: a reader may see an
// operation of one moment and ranks of the next.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "../types.h"

namespace pycomm {

inline constexpr uint64_t status_magic = 0x3173757461747370;  // "pstatus1"
inline constexpr int status_rows = 20;
inline constexpr int shown_missing = 12;
// Of a row: nobody's, being written, shown, of a group that is closed.
inline constexpr uint32_t status_free = 0, status_taken = 1, status_shown = 2, status_closed = 3;

// Read by pycomm/status/pages.py, which has the same places.
struct StatusRow {
  std::atomic<uint32_t> used;
  int32_t rank, world_size;
  std::atomic<uint32_t> waiting_in;  // OpKind of the slow wait that it is in; 0: in none
  std::atomic<uint64_t> operation;  // number << 8 | OpKind; 0: in none
  std::atomic<uint64_t> completed;  // number of the last one
  std::atomic<uint64_t> waiting_since_ns;
  std::atomic<uint32_t> missing;  // how many ranks it waits for
  std::atomic<uint16_t> ranks[shown_missing];  // the first of them
  char name[108];
};
static_assert(sizeof(StatusRow) == 176);

struct StatusPage {
  std::atomic<uint64_t> magic;
  int32_t pid;
  std::atomic<uint32_t> not_shown;  // groups for which there was no row
  StatusRow rows[status_rows];
};
static_assert(sizeof(StatusPage) <= 4096);

// A row of `page`, or nullptr: no page, or none is free.
StatusRow* take_status_row(std::byte* page, const std::string& name, int rank, int world_size);
void give_back(StatusRow* row);

}  // namespace pycomm
