// kernels.cuh -- the one place that says which kernels exist: (kernel, element type, reduce op) -> function
// template.
//
// As on the CPU (arithmetic/reduce.cc), calls are mapped to the few kernels there are before they come here
// (reduction_key in choice.cc): complex sums to sums of their parts, unsigned for sums and products of
// integers, bytes for bitwise operations, avg and premul_sum to sums with a factor.
#pragma once

#include "bracket.cuh"
#include "key.h"
#include "message.cuh"
#include "move.cuh"
#include "multimem.cuh"
#include "one_shot.cuh"
#include "ring.cuh"
#include "two_shot.cuh"

namespace pycomm::cuda {

constexpr bool reduces(Kernel kernel) {
  return kernel == Kernel::one_shot || kernel == Kernel::two_shot || kernel == Kernel::ring ||
         kernel == Kernel::multimem;
}

// Calls visit.template operator()<T, op>() for a pair that has kernels; false for any other.
template <class T, ReduceOp... ops, class Visit>
constexpr bool visit_ops(ReduceOp op, const Visit& visit) {
  return ((op == ops && (visit.template operator()<T, ops>(), true)) || ...);
}
template <class Visit>
constexpr bool visit_types(DType dtype, ReduceOp op, const Visit& visit) {
  using enum ReduceOp;
  switch (dtype) {
    case DType::f64: return visit_ops<double, sum, product, min, max>(op, visit);
    case DType::f32: return visit_ops<float, sum, product, min, max>(op, visit);
    case DType::f16: return visit_ops<F16, sum, product, min, max>(op, visit);
    case DType::bf16: return visit_ops<BF16, sum, product, min, max>(op, visit);
    case DType::i8: return visit_ops<int8_t, min, max>(op, visit);
    case DType::i16: return visit_ops<int16_t, min, max>(op, visit);
    case DType::i32: return visit_ops<int32_t, min, max>(op, visit);
    case DType::i64: return visit_ops<int64_t, min, max>(op, visit);
    case DType::u8: return visit_ops<uint8_t, sum, product, min, max, band, bor, bxor>(op, visit);
    case DType::u16: return visit_ops<uint16_t, sum, product, min, max>(op, visit);
    case DType::u32: return visit_ops<uint32_t, sum, product, min, max>(op, visit);
    case DType::u64: return visit_ops<uint64_t, sum, product, min, max>(op, visit);
    case DType::boolean: return visit_ops<Bool8, band, bor, bxor>(op, visit);
    case DType::c64: return visit_ops<Complex<float>, product>(op, visit);
    case DType::c128: return visit_ops<Complex<double>, product>(op, visit);
    default: return false;
  }
}

template <Kernel kernel, class T, ReduceOp op, class Ctx>
PC_FN void run_kernel(Ctx& c, const Args& a) {
  if constexpr (kernel == Kernel::one_shot) one_shot<T, op>(c, a);
  else if constexpr (kernel == Kernel::two_shot) two_shot<Reduce<T, op>>(c, a);
  else if constexpr (kernel == Kernel::ring) ring<T, op>(c, a);
  else if constexpr (kernel == Kernel::multimem) multimem<T>(c, a);
  else if constexpr (kernel == Kernel::copy_two_shot) two_shot<CopyFromRoot>(c, a);
  else if constexpr (kernel == Kernel::move) move(c, a);
  else if constexpr (kernel == Kernel::open) open(c, a);
  else if constexpr (kernel == Kernel::close) close(c, a);
  else if constexpr (kernel == Kernel::send) send(c, a);
  else if constexpr (kernel == Kernel::recv) recv(c, a);
}

// Which (T, op) a reducing kernel exists for: one_shot carries 8 bytes; a ring must not round on the way, and
// is built for sums only, since two_shot does the rest; the switch adds three types.
template <Kernel kernel, class T, ReduceOp op>
inline constexpr bool exists =
    (kernel == Kernel::two_shot) || (kernel == Kernel::one_shot && sizeof(T) <= 8) ||
    (kernel == Kernel::ring && op == ReduceOp::sum && std::is_same_v<T, Acc<T>>) ||
    (kernel == Kernel::multimem && op == ReduceOp::sum &&
     (std::is_same_v<T, float> || std::is_same_v<T, F16> || std::is_same_v<T, BF16>));

// Calls visit.template operator()<kernel, T, op>() once; false if there is no such kernel.
template <class Visit>
constexpr bool visit_kernel(const KernelKey& key, const Visit& visit) {
  bool found = false;
  auto reducing = [&]<Kernel kernel>() {
    visit_types(key.dtype, key.op, [&]<class T, ReduceOp op>() {
      if constexpr (exists<kernel, T, op>) {
        visit.template operator()<kernel, T, op>();
        found = true;
      }
    });
  };
  auto plain = [&]<Kernel kernel>() {
    visit.template operator()<kernel, uint8_t, ReduceOp::sum>();
    found = true;
  };
  switch (key.kernel) {
    case Kernel::one_shot: reducing.template operator()<Kernel::one_shot>(); break;
    case Kernel::two_shot: reducing.template operator()<Kernel::two_shot>(); break;
    case Kernel::ring: reducing.template operator()<Kernel::ring>(); break;
    case Kernel::multimem: reducing.template operator()<Kernel::multimem>(); break;
    case Kernel::copy_two_shot: plain.template operator()<Kernel::copy_two_shot>(); break;
    case Kernel::move: plain.template operator()<Kernel::move>(); break;
    case Kernel::open: plain.template operator()<Kernel::open>(); break;
    case Kernel::close: plain.template operator()<Kernel::close>(); break;
    case Kernel::send: plain.template operator()<Kernel::send>(); break;
    case Kernel::recv: plain.template operator()<Kernel::recv>(); break;
  }
  return found;
}

}  // namespace pycomm::cuda
