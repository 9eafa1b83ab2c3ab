// ctx.cuh -- the kernels' whole view of the machine.
//
// Every kernel is a function template over a context `Ctx& c` and touches threads, memory of other ranks and
// time through it alone:
//
//   c.thread() threads() block() blocks()   who I am in this launch
//   c.sync()                                barrier of the block: orders all its memory accesses
//   c.sync_or(flag)                         the same, and true for all threads if `flag` was true for any
//   c.shuffle(value, lane)                  the value that `lane` of this warp passed; orders nothing
//   c.shared<T>()                           the block's shared memory as one struct; undefined at the start
//   c.ld16 st16, c.ld<T> st<T>              data: plain accesses, aligned to 16 and alignof(T). A race on
//                                           them is a bug
//   c.ld_words st_words                     16 bytes as two relaxed 8-byte words, system scope: data and flag
//                                           in one word (one_shot.cuh)
//   c.load_acquire store_release            flags (8 bytes), with a scope
//   c.load_relaxed store_relaxed            words whose order does not matter (error word, counters)
//   c.add(word, n, scope)                   fetch-and-add, acquire and release
//   c.relax(word)                           in every loop that waits for `word` to change; nothing on the GPU
//   c.now_ns()                              a clock that runs at the same speed for all ranks
//   Ctx::polls                              rounds of a waiting loop between looks at clock and error word
//   c.multimem_reduce<T> multimem_store     (sm_90 and NVSwitch) 16 bytes through a multicast address
//
// CudaCtx below is that in inline PTX. tests/cpp/cuda/fiber.h has FiberCtx, which runs the same kernels on a
// CPU under a scheduler and under ThreadSanitizer. So nothing else may be used in a kernel: no threadIdx, no
// fences (TSan does not know them), no ld.global.nc.
//
// Why a parameter and not macros that fake threadIdx: the same source serves any number of contexts in one
// program, and a reader sees in the signature what a function can do. It costs nothing: every member is one
// instruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

// PC_FN: inlined. PC_CALL: compiled once for all kernels, where a call costs nothing beside what it does
// (waiting, copying); without it nvcc took three times as long and registers ran out.
#ifdef __CUDACC__
#define PC_FN __device__ __forceinline__
#define PC_CALL __device__ __noinline__
#else
#define PC_FN inline
#define PC_CALL inline
#endif

namespace pycomm::cuda {

// How far a flag's ordering reaches: the threads of this GPU, or every GPU and the host. Ranks may always sit
// on different GPUs, so what one rank tells another is `system`.
enum class Scope { gpu, system };

struct F16;  // number.cuh
struct BF16;

struct alignas(16) U4 {
  uint32_t x, y, z, w;
};

#ifdef __CUDACC__

class CudaCtx {
 public:
  static constexpr uint32_t polls = 256;

  PC_FN int thread() const { return threadIdx.x; }
  PC_FN int threads() const { return blockDim.x; }
  PC_FN int block() const { return blockIdx.x; }
  PC_FN int blocks() const { return gridDim.x; }

  PC_FN void sync() { __syncthreads(); }
  PC_FN bool sync_or(bool flag) { return __syncthreads_or(flag); }
  PC_FN uint64_t shuffle(uint64_t value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

  template <class T>
  PC_FN T& shared() {
    __shared__ T memory;
    return memory;
  }

  PC_FN U4 ld16(const void* p) {
    U4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
  }
  PC_FN void st16(void* p, U4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  }
  template <class T>
  PC_FN T ld(const T* p) {
    return *p;
  }
  template <class T>
  PC_FN void st(T* p, T v) {
    *p = v;
  }

  PC_FN U4 ld_words(const void* p) {
    uint64_t a, b;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
    return {static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b),
            static_cast<uint32_t>(b >> 32)};
  }
  PC_FN void st_words(void* p, U4 v) {
    const uint64_t a = v.x | static_cast<uint64_t>(v.y) << 32, b = v.z | static_cast<uint64_t>(v.w) << 32;
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(p), "l"(a), "l"(b) : "memory");
  }

  PC_FN uint64_t load_acquire(const uint64_t* p, Scope scope) {
    uint64_t v;
    if (scope == Scope::gpu)
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    else asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
  }
  PC_FN void store_release(uint64_t* p, uint64_t v, Scope scope) {
    if (scope == Scope::gpu) asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
    else asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  }
  PC_FN uint64_t load_relaxed(const uint64_t* p, Scope scope) {
    uint64_t v;
    if (scope == Scope::gpu)
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    else asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
  }
  PC_FN void store_relaxed(uint64_t* p, uint64_t v, Scope scope) {
    if (scope == Scope::gpu) asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
    else asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  }
  PC_FN uint64_t add(uint64_t* p, uint64_t n, Scope scope) {
    uint64_t v;
    if (scope == Scope::gpu)
      asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(v) : "l"(p), "l"(n) : "memory");
    else asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;" : "=l"(v) : "l"(p), "l"(n) : "memory");
    return v;
  }

#if __CUDA_ARCH__ >= 900
  // The sum over all ranks' copies, added in f32. `p` is a multicast address.
  template <class T>
  PC_FN U4 multimem_reduce(const void* p) {
    U4 v;
    if constexpr (std::is_same_v<T, float>)
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "l"(p)
                   : "memory");
    else if constexpr (std::is_same_v<T, F16>)
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "l"(p)
                   : "memory");
    else
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "l"(p)
                   : "memory");
    return v;
  }
  PC_FN void multimem_store(void* p, U4 v) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
  }
#endif

  PC_FN void relax(const void*) {}
  PC_FN uint64_t now_ns() {
    uint64_t v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
  }
};

#endif

}  // namespace pycomm::cuda
