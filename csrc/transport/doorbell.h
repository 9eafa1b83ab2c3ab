// doorbell.h -- waking ranks that sleep. See [Note: no lost wake-up] in wait.h.
#pragma once

#include "group_memory.h"

namespace pycomm {

void ring(RankControl& control);
// Rings those that sleep. The caller has fenced after its store.
void ring_sleeper(RankControl& control);
void ring_all_sleepers(const GroupMemory& memory);
bool anyone_sleeps(const GroupMemory& memory);
// Wakes the worker of that rank if it sleeps. The caller has fenced after its store.
void ring_sleeping_helper(RankControl& control);
// Sleeps until the helper's bell is no longer as `seen`, at most `seconds`.
void sleep_on_helper_bell(RankControl& control, uint32_t seen, double seconds);
// Sleeps until the doorbell is no longer as `seen`, at most `seconds`.
void sleep_on(RankControl& control, uint32_t seen, double seconds);

}  // namespace pycomm
