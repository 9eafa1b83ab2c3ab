// identity.cc -- see identity.h.
#include "identity.h"

namespace pycomm {

std::string Identity::name(int peer) const {
  return "rank " + std::to_string(number(peer)) + (part() ? " (" + whole.host + ")" : "");
}

std::string Identity::where(const OpInfo& op) const {
  std::string text =
      "[rank " + std::to_string(number(rank)) + "/" + std::to_string(part() ? whole.world_size : world_size);
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
  throw error_about(kind, op, number(peer), text);
}

CommError Identity::error_about(ErrorKind kind, const OpInfo& op, int about, const std::string& text) const {
  return {kind, where(op) + text, number(rank), part() ? whole.world_size : world_size, op, about};
}

}  // namespace pycomm
