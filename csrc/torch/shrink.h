// shrink.h -- a group of those that live, made of a group that has lost ranks: transport/survivors.h agrees
// on them, and they join as the ranks of any group do, with the pages of the old group as their store.
#pragma once

#include <memory>
#include <vector>

#include "../transport/survivors.h"
#include "connect.h"

namespace pycomm {

// Collective among the survivors. The old group is closed. Throws std::invalid_argument where nothing is lost
// or the ranks are threads that play hosts, CommError of Survivors::agree or of the creation of the group;
// then the old group is as it was, and the call may be made again. Over hosts see pycomm/survivors/.
Shrunk shrink(const std::shared_ptr<Communicator>& comm, const std::vector<int>& exclude, bool exactly,
              double timeout);

}  // namespace pycomm
