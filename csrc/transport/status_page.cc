// status_page.cc -- see status_page.h.
#include "status_page.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace pycomm {

StatusRow* take_status_row(std::byte* memory, const std::string& name, int rank, int world_size) {
  if (!memory) return nullptr;
  auto& page = *reinterpret_cast<StatusPage*>(memory);
  page.pid = ::getpid();
  page.magic.store(status_magic, std::memory_order_release);
  for (StatusRow& row : page.rows) {
    uint32_t unused = status_free;
    if (!row.used.compare_exchange_strong(unused, status_taken)) continue;
    row.rank = rank;
    row.world_size = world_size;
    row.waiting_in.store(0);
    row.operation.store(0);
    row.completed.store(0);
    row.missing.store(0);
    std::memset(row.name, 0, sizeof(row.name));
    std::memcpy(row.name, name.data(), std::min(name.size(), sizeof(row.name) - 1));
    row.used.store(status_shown, std::memory_order_release);
    return &row;
  }
  page.not_shown.fetch_add(1, std::memory_order_relaxed);
  return nullptr;
}

void give_back(StatusRow* row) {
  if (row) row->used.store(status_free, std::memory_order_release);
}

}  // namespace pycomm
