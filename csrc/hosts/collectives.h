// collectives.h -- the collectives over hosts, one per file. Each begins the agreement, may run steps inside
// the host that write no result while host_agrees(), concludes it, and then moves its data.
#pragma once

#include "agree.h"
#include "operation.h"

namespace pycomm::across {

void all_reduce(Operation& operation, Agreement& agreement);
void reduce(Operation& operation, Agreement& agreement);
void broadcast(Operation& operation, Agreement& agreement);
void all_gather(Operation& operation, Agreement& agreement);
void reduce_scatter(Operation& operation, Agreement& agreement);
void all_to_all(Operation& operation, Agreement& agreement);
void gather(Operation& operation, Agreement& agreement);
void scatter(Operation& operation, Agreement& agreement);

}  // namespace pycomm::across
