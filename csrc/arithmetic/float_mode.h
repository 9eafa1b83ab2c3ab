// float_mode.h -- one way of rounding for every reduction, whichever thread runs it. Private to this folder.
//
// [Note: the mode of a thread] How a CPU treats denormal numbers, how it rounds and whether an exception
// traps stand in a register of each thread: MXCSR on x86-64, FPCR on aarch64. A new thread inherits it; later
// changes (torch.set_flush_denormal, fesetround, feenableexcept, a library built with -ffast-math) are of the
// calling thread alone. An operation runs in the caller's thread, in the worker or in a lane, as it happens,
// and on each rank in another one. So a reduction runs in the mode in which a program starts (IEEE 754:
// denormals are kept, to nearest, no traps), and the thread has its own mode back afterwards, with its own
// status flags.
//
// To look costs 2 ns; the register is written only where the mode differs.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pycomm {

class StandardFloatMode {
 public:
  StandardFloatMode() : found_(get()) {
    if ((found_ & ~flags) != standard) set(standard);
  }
  ~StandardFloatMode() {
    if ((found_ & ~flags) != standard) set(found_);
  }
  StandardFloatMode(const StandardFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word standard = 0x1f80;  // all exceptions masked
  static constexpr Word flags = 0x3f;  // which exceptions there have been
  static Word get() { return _mm_getcsr(); }
  static void set(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word standard = 0, flags = 0;  // those are in another register
  static Word get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void set(Word word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
  using Word = uint32_t;
  static constexpr Word standard = 0, flags = 0;
  static Word get() { return standard; }
  static void set(Word) {}
#endif

  const Word found_;
};

}  // namespace pycomm
