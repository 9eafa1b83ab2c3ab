// state.h -- what the parts of a group share. Each part says at its head which lock guards it.
#pragma once

#include <utility>

#include "deadlines.h"
#include "device_times.h"
#include "works.h"

namespace pycomm::cuda {

struct GroupState {
  explicit GroupState(Setup agreed) : setup(std::move(agreed)) {}
  GroupState(const GroupState&) = delete;

  const Setup setup;
  GroupLock lock{setup.comm.transport()};
  HostWords words{setup};
  std::shared_ptr<EventPool> events = std::make_shared<EventPool>(setup.device);
  DeviceTimes times{setup, lock};
  Lines lines{setup.world_size()};
  LineStreams line_streams{};
  Faults faults{setup, words};
  Deadlines deadlines{setup, words, lines, faults};
  Works works{lock, setup, words, faults};
};

}  // namespace pycomm::cuda
