// interrupt.h -- how the thread that waits is called away from a wait (Ctrl-C): it asks, now and then, a
// function that the program has set. The transport knows no Python (torch/interpreter.h).
#pragma once

namespace pycomm {

inline constexpr const char* interrupted_text = "interrupted while it waited";

// True: the wait of the calling thread must end. Set once for the process; none: nothing interrupts.
void set_interrupt_check(bool (*check)());

// Asks, at most every 50 ms in a thread. After true the caller must end its wait with an error.
bool interrupted();

}  // namespace pycomm
