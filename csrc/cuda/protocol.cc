// protocol.cc -- see protocol.h.
#include "protocol.h"

#include <algorithm>
#include <stdexcept>

#include "budget.h"

namespace pycomm::cuda {

namespace {

// Threads of one process on one device: each has a stream of its own and the caller's, and no two of them may
// share a hardware queue. Those of messages are counted when they are made: [Note: hardware queues] in
// budget.h.
void check_queues(const std::vector<Place>& places, const std::string& where) {
  for (const Place& place : places) {
    const int ranks = count_on_device(places, place, true);
    if (ranks == 1 || 2 * ranks <= queues_of(place)) continue;
    std::string text = where + std::to_string(ranks) + " ranks are threads of process " +
                       std::to_string(place.pid) + " on one device. Their streams need " +
                       std::to_string(2 * ranks) + " hardware queues, and there are " +
                       std::to_string(queues_of(place)) +
                       ": a launch could wait for ever behind one that waits for it. ";
    if (2 * ranks <= max_connections)
      text += "Set CUDA_DEVICE_MAX_CONNECTIONS=32 before the first CUDA call of the process.";
    else
      text += "A device has at most 32: use " + std::to_string(max_connections / 2) +
              " ranks per device and process or fewer.";
    throw std::runtime_error(text);
  }
}

// The first two ranks of different processes that share a device on which their contexts take turns.
bool take_turns(const std::vector<Place>& places, size_t* first, size_t* second) {
  for (size_t a = 0; a < places.size(); ++a)
    for (size_t b = a + 1; b < places.size(); ++b) {
      if (!places[a].same_device(places[b]) || places[a].same_process(places[b]) ||
          (places[a].mps && places[b].mps))
        continue;
      *first = a;
      *second = b;
      return true;
    }
  return false;
}

// Fills in the blocks of resident kernels. A rank with a device of its own also has room there for all of its
// messages at once; on a shared one these go in stream order, or, where that is impossible, have one block
// each of the rank's part.
void share_out(const std::vector<Place>& places, ProtocolChoice& choice) {
  const int lines = 2 * static_cast<int>(places.size());  // to and from each rank, itself too
  bool shared = false, in_order = true;
  int part = INT32_MAX;
  for (const Place& place : places) {
    const int ranks = count_on_device(places, place, false);
    shared |= ranks > 1;
    in_order &= place.stream_memory_operations != 0;
    part = std::min(part, place.multiprocessors / ranks);
  }
  choice.messages_in_order = shared && in_order;
  const int beside = choice.messages_in_order ? 0 : lines;
  choice.blocks = std::min(max_blocks, shared ? part - beside : std::max(part - beside, 1));
  choice.message_blocks = message_blocks;
  if (beside)
    choice.message_blocks = shared ? 1 : std::clamp((part - choice.blocks) / beside, 1, message_blocks);
}

ProtocolChoice stream_ordered(const std::vector<Place>& places, const std::string& where,
                              const std::string& reason) {
  int blocks = max_blocks;
  for (size_t p = 0; p < places.size(); ++p) {
    blocks = std::clamp(places[p].multiprocessors, 1, blocks);
    if (!places[p].stream_memory_operations)
      throw std::runtime_error(
          where + "protocol stream_ordered (" + reason +
          ") needs stream memory operations, which the device of rank " + std::to_string(p) +
          " does not offer. Give each rank its own device, start MPS (nvidia-cuda-mps-control -d)" +
          " or run the ranks as threads of one process.");
  }
  return {Protocol::stream_ordered, blocks, message_blocks, true, reason};
}

std::string why_resident(const std::vector<Place>& places) {
  bool shared = false, several = false;
  for (const Place& place : places) {
    const int ranks = count_on_device(places, place, false);
    shared |= ranks > 1;
    several |= count_on_device(places, place, true) < ranks;
  }
  return !shared   ? "every rank has its own device"
         : several ? "the processes on a device run together under MPS"
                   : "the ranks on a device are threads of one process";
}

}  // namespace

const char* to_string(Protocol protocol) {
  return protocol == Protocol::resident ? "resident" : "stream_ordered";
}

ProtocolChoice choose_protocol(const std::vector<Place>& places, int rank, Requested requested, int room) {
  const std::string where = "[rank " + std::to_string(rank) + "/" + std::to_string(places.size()) + "] ";
  check_queues(places, where);
  if (requested == Requested::stream_ordered) return stream_ordered(places, where, "as requested");

  size_t first = 0, second = 0;
  const bool turns = take_turns(places, &first, &second);
  ProtocolChoice choice{Protocol::resident, 0, 0, false,
                        requested == Requested::resident ? "as requested" : why_resident(places)};
  share_out(places, choice);
  const bool fits = choice.blocks >= 1;
  choice.blocks = std::min(choice.blocks, room);
  if (!turns && choice.blocks >= 1) return choice;

  std::string reason;
  if (turns)
    reason = "ranks " + std::to_string(first) + " and " + std::to_string(second) +
             " are processes that share a device without MPS";
  else if (fits) reason = "other groups of this process have taken the multiprocessors of a shared device";
  else reason = "more ranks share a device than it has multiprocessors";
  if (requested == Requested::automatic) return stream_ordered(places, where, reason);
  throw std::runtime_error(
      where + "protocol resident cannot work: " + reason +
      (turns  ? ", so their kernels take turns and one that waits for the other's stops both. Start MPS"
                " (nvidia-cuda-mps-control -d), run the ranks as threads of one process, give each its own "
                "device,"
       : fits ? ", and kernels of several groups that wait at the same time must all have room. Close those"
                " groups,"
              : ", so their kernels cannot run at the same time. Use fewer ranks per device") +
      " or request stream_ordered.");
}

}  // namespace pycomm::cuda
