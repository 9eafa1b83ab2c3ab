// identity.h -- who this rank is in its group, and the errors that it raises.
#pragma once

#include <string>

#include "../error.h"

namespace pycomm {

struct Identity {
  std::string group;
  int rank = 0;
  int world_size = 1;

  std::string where(const OpInfo& op) const;  // "[rank 2/4] all_reduce #17: "
  [[noreturn]] void raise(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) const;
};

}  // namespace pycomm
