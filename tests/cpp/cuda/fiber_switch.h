// fiber_switch.h -- leaving one stack for another: x86-64 and aarch64.
//
// fiber_switch(&from, to) pushes the registers that a callee must preserve, stores the stack pointer in
// `from`, loads `to` and pops the same registers there. The rest is saved by the compiler, as around any
// call. swapcontext does the same with two system calls for the signal mask, 50 times slower. The
// floating-point control words are not saved: nothing here changes them.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
__attribute__((visibility("hidden"))) void pycomm_fiber_switch(void** from, void* to);
__attribute__((visibility("hidden"))) void
pycomm_fiber_start();  // the first return address of a stack: calls function(argument)
}

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.hidden pycomm_fiber_switch
.globl pycomm_fiber_switch
.type pycomm_fiber_switch, @function
pycomm_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pycomm_fiber_switch, .-pycomm_fiber_switch
.p2align 4
.hidden pycomm_fiber_start
.globl pycomm_fiber_start
.type pycomm_fiber_start, @function
pycomm_fiber_start:
  .cfi_startproc
  .cfi_undefined rip
  xorl %ebp, %ebp
  movq %rbx, %rdi
  call *%r12
  ud2
  .cfi_endproc
.size pycomm_fiber_start, .-pycomm_fiber_start
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.hidden pycomm_fiber_switch
.globl pycomm_fiber_switch
.type pycomm_fiber_switch, %function
pycomm_fiber_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size pycomm_fiber_switch, .-pycomm_fiber_switch
.p2align 4
.hidden pycomm_fiber_start
.globl pycomm_fiber_start
.type pycomm_fiber_start, %function
pycomm_fiber_start:
  .cfi_startproc
  .cfi_undefined x30
  mov x29, #0
  mov x0, x19
  blr x20
  brk #1
  .cfi_endproc
.size pycomm_fiber_start, .-pycomm_fiber_start
)");
#else
#error "fibers: x86-64 and aarch64 only"
#endif

namespace pycomm::cuda::fiber {

// The stack pointer to switch to, for a new stack that ends at `top` (a multiple of 16) and shall run
// function(argument).
inline void* prepare_stack(std::byte* top, void (*function)(void*), void* argument) {
#if defined(__x86_64__)
  constexpr int words = 9, argument_word = 4, function_word = 3,
                return_word = 6;  // r15 r14 r13 r12 rbx rbp return - -
#else
  constexpr int words = 20, argument_word = 0, function_word = 1,
                return_word = 11;  // x19 x20 ... x29 x30 d8 ... d15
#endif
  auto* frame = reinterpret_cast<uintptr_t*>(top) - words;
  for (int i = 0; i < words; i++) frame[i] = 0;
  frame[argument_word] = reinterpret_cast<uintptr_t>(argument);
  frame[function_word] = reinterpret_cast<uintptr_t>(function);
  frame[return_word] = reinterpret_cast<uintptr_t>(&pycomm_fiber_start);
  return frame;
}

}  // namespace pycomm::cuda::fiber
