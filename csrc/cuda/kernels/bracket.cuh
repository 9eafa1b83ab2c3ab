// bracket.cuh -- the two ends of an operation whose data something else moves: the copy engine between them
// (../plan_bracket.cc), or nothing (barrier).
//
//   open    headers: all ranks make the same call, and their buffers are ready
//   close   all are done with the buffers of the others; ends the operation
//
// A barrier is open alone, which then ends the operation too.
#pragma once

#include "session.cuh"

namespace pycomm::cuda {

template <class Ctx>
PC_FN void open(Ctx& c, const Args& a) {
  Session<Ctx> session(c, a);
  session.begin();
  session.end();
}

// The headers of the same operation are there since open(); comparing them again makes a mismatch skip the
// exchange on every rank alike.
template <class Ctx>
PC_FN void close(Ctx& c, const Args& a) {
  Session<Ctx> session(c, a);
  if (session.begin()) {
    if (a.stages & stage_fill) session.post(Flag::drained, a.reads, 0);
    if (a.stages & stage_gather) session.wait(Flag::drained, a.exposes, 0);
  }
  session.end();
}

}  // namespace pycomm::cuda
