// identity.cc -- see identity.h.
#include "identity.h"

namespace pycomm {

std::string Identity::where(const OpInfo& op) const {
  std::string text = "[rank " + std::to_string(rank) + "/" + std::to_string(world_size);
  if (!group.empty() && group != "default") text += " of group " + group;
  text += "] ";
  if (op.kind != OpKind::none) {
    text += to_string(op.kind);
    if (op.sequence) text += " #" + std::to_string(op.sequence);
    text += ": ";
  }
  return text;
}

void Identity::raise(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) const {
  throw CommError(kind, where(op) + text, rank, world_size, op, peer);
}

}  // namespace pycomm
