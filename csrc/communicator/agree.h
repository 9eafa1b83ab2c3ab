// agree.h -- what ranks must know of each other before they go on: small values, and whether a step worked
// everywhere.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "communicator.h"

namespace pycomm {

// Collective: the value of every rank, by rank.
template <class T>
std::vector<T> all_gather_value(Communicator& comm, const T& value) {
  static_assert(std::is_trivially_copyable_v<T> && !std::is_same_v<T, bool>);
  std::vector<T> values(comm.world_size(), value);
  Op op;
  op.kind = OpKind::all_gather;
  op.count = sizeof(T);
  op.in = reinterpret_cast<const std::byte*>(&value);
  for (T& each : values) op.out_parts.push_back({reinterpret_cast<std::byte*>(&each), sizeof(T)});
  comm.run(std::move(op));
  return values;
}

// How a step went on one rank; an empty text means well.
struct Verdict {
  char text[256] = {};

  bool ok() const { return text[0] == 0; }
};

// Runs a step that may throw, and keeps what went wrong.
template <class Step>
Verdict attempt(const Step& step) {
  Verdict verdict;
  try {
    step();
  } catch (const std::exception& error) {
    std::snprintf(verdict.text, sizeof(verdict.text), "%s", *error.what() ? error.what() : "unknown error");
  }
  return verdict;
}

// "rank 2: cuMemAlloc failed: ..." for the first rank that failed, which goes to *rank; empty if all did
// well.
inline std::string first_failure(const std::vector<Verdict>& verdicts, int* rank = nullptr) {
  for (size_t p = 0; p < verdicts.size(); ++p) {
    if (verdicts[p].ok()) continue;
    if (rank) *rank = static_cast<int>(p);
    return "rank " + std::to_string(p) + ": " + verdicts[p].text;
  }
  return "";
}

// Throws CommError if any rank failed; given the gathered verdicts, that is the same on every rank. The group
// stays usable, unless one has died meanwhile: then that is why the other failed.
inline void raise_if_failed(Communicator& comm, const std::vector<Verdict>& verdicts,
                            const OpInfo& op = {OpKind::alloc, 0}) {
  int rank = -1;
  const std::string failure = first_failure(verdicts, &rank);
  if (failure.empty()) return;
  for (int p = 0; p < comm.world_size(); ++p)
    if (p != comm.rank() && !comm.transport().peer_alive(p))
      comm.transport().fail(ErrorKind::peer, op, p,
                            "rank " + std::to_string(p) + " died (its process ended)");
  comm.transport().raise(ErrorKind::none, op, rank, failure);
}

// Collective: throws on every rank if any rank's verdict is bad.
inline void agree(Communicator& comm, const Verdict& verdict, const OpInfo& op = {OpKind::alloc, 0}) {
  raise_if_failed(comm, all_gather_value(comm, verdict), op);
}

}  // namespace pycomm
