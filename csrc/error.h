// error.h -- what goes wrong on the wire. Every message names rank, operation, sequence number and the way
// out.
#pragma once

#include <stdexcept>
#include <string>

#include "types.h"

namespace pycomm {

enum class ErrorKind : uint32_t { none, mismatch, peer, timeout, aborted };

// Who raises and in which operation; copied into the error so that Python sees it as attributes.
struct OpInfo {
  OpKind kind = OpKind::none;
  uint64_t sequence = 0;
};

class CommError : public std::runtime_error {
 public:
  CommError(ErrorKind kind, const std::string& message, int rank, int world_size, OpInfo op, int peer)
      : std::runtime_error(message), kind(kind), rank(rank), world_size(world_size), op(op), peer(peer) {}

  ErrorKind kind;
  int rank;
  int world_size;
  OpInfo op;
  int peer;  // the rank that differs, died or did not come; -1 when no single one
};

}  // namespace pycomm
