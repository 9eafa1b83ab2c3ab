// record.h -- what each rank tells the others before they share memory.
#pragma once

#include <string>
#include <vector>

#include "../memory/life.h"

namespace pycomm {

struct Record {
  std::string host;  // ranks with the same one can share memory
  std::string label;  // what people call it
  uint64_t token = 0;  // of the process
  int primary = 0;  // the process has a group already
  int threads = 1;
  std::string cores, cache;  // that the process may run on; those of one cache (cores.h)
  std::vector<LifeRef> lives;  // locks that the process holds already, and keeps until the group is made

  std::string pack() const;
  static Record unpack(const std::string& text);  // std::runtime_error: of another version of pycomm
};

// This process's, without `primary`, `threads` and `lives`. `host_id` overrides the identity of the host.
Record own_record(const std::string& host_id);

}  // namespace pycomm
