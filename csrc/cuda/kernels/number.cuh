// number.cuh -- element types and reduce operations, one element or 16 bytes at a time.
//
// The same rules as on the CPU (arithmetic/kernels.inc), so that both give the same bits: 16-bit types widen
// to f32, add up there and round once; sources are taken in rank order; premul_sum multiplies each input, avg
// divides the sum; a NaN on either side of min and max wins, and every NaN becomes the same one. Products are
// not contracted with sums (nvcc -fmad=false).
#pragma once

#include <cstring>
#include <type_traits>

#include "layout.h"

namespace pycomm::cuda {

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};
struct Bool8 {  // logical operations: made 0 or 1 when read
  uint8_t bits;
};
template <class T>
struct alignas(2 * sizeof(T)) Complex {  // for products; sums are those of the parts
  T re, im;
};

#ifdef __CUDA_ARCH__
PC_FN float widen(F16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
PC_FN F16 to_f16(float x) {
  F16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
PC_FN float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
PC_FN uint32_t float_to_bits(float x) { return __float_as_uint(x); }
#else
PC_FN float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
PC_FN uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
PC_FN float widen(F16 x) {  // after Giesen, "half to float done quickly"
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13, sign = (x.bits & 0x8000u) << 16;
  if (magnitude >= 0x0f800000) return bits_to_float(magnitude | 0x7f800000 | sign);
  if (magnitude >= 0x00800000) return bits_to_float((magnitude + (112u << 23)) | sign);
  const float subnormal = bits_to_float(magnitude + (113u << 23)) - bits_to_float(113u << 23);
  return bits_to_float(float_to_bits(subnormal) | sign);
}
PC_FN F16 to_f16(float x) {
  const uint32_t bits = float_to_bits(x), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  uint32_t half;
  if (magnitude > 0x7f800000) half = 0x7e00;
  else if (magnitude >= 143u << 23) half = 0x7c00;
  else if (magnitude >= 113u << 23) half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  else half = float_to_bits(bits_to_float(magnitude) + 0.5f) - (126u << 23);  // the FPU rounds at bit 2^-24
  return {static_cast<uint16_t>(half | sign)};
}
#endif

PC_FN float widen(BF16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
PC_FN BF16 to_bf16(float x) {  // to nearest even; NaN has been made canonical before
  const uint32_t bits = float_to_bits(x);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// What sums of T are kept in.
template <class T>
struct AccOf {
  using Type = T;
};
template <>
struct AccOf<F16> {
  using Type = float;
};
template <>
struct AccOf<BF16> {
  using Type = float;
};
template <>
struct AccOf<Bool8> {
  using Type = uint8_t;
};
template <class T>
using Acc = typename AccOf<T>::Type;

template <class T>
PC_FN Acc<T> to_acc(T x) {
  if constexpr (std::is_same_v<T, F16> || std::is_same_v<T, BF16>) return widen(x);
  else if constexpr (std::is_same_v<T, Bool8>) return x.bits != 0;
  else return x;
}

template <class A>
PC_FN A one_nan(A x) {
  if constexpr (std::is_same_v<A, float>) return x == x ? x : bits_to_float(0x7fc00000);
  else if constexpr (std::is_same_v<A, double>)
    return x == x ? x : static_cast<double>(bits_to_float(0x7fc00000));
  else return x;
}
template <class T>
PC_FN Complex<T> one_nan(Complex<T> x) {
  return {one_nan(x.re), one_nan(x.im)};
}

template <class T>
PC_FN T from_acc(Acc<T> x) {
  if constexpr (std::is_same_v<T, F16>) return to_f16(one_nan(x));
  else if constexpr (std::is_same_v<T, BF16>) return to_bf16(one_nan(x));
  else if constexpr (std::is_same_v<T, Bool8>) return {x};
  else return one_nan(x);
}

template <ReduceOp op, class A>
PC_FN A combine(A a, A b) {
  if constexpr (op == ReduceOp::product) return static_cast<A>(a * b);
  else if constexpr (op == ReduceOp::min) return (a < b) || a != a ? a : b;
  else if constexpr (op == ReduceOp::max) return (a > b) || a != a ? a : b;
  else if constexpr (op == ReduceOp::band) return a & b;
  else if constexpr (op == ReduceOp::bor) return a | b;
  else if constexpr (op == ReduceOp::bxor) return a ^ b;
  else return static_cast<A>(a + b);
}
template <ReduceOp op, class T>
PC_FN Complex<T> combine(Complex<T> a, Complex<T> b) {
  static_assert(op == ReduceOp::product);
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

// Before the first addition and after the last one.
template <ReduceOp op, class A>
PC_FN A prepare(const Args& a, A x) {
  if constexpr (op == ReduceOp::sum && std::is_floating_point_v<A>)
    if (a.premultiply) return x * static_cast<A>(a.factor);
  return x;
}
template <ReduceOp op, class A>
PC_FN A conclude(const Args& a, A x) {
  if constexpr (op == ReduceOp::sum && std::is_integral_v<A>) {
    // Signed sums come as unsigned ones, which have the same bits. Their average is that of the magnitude,
    // with the sign.
    using Wide = std::conditional_t<sizeof(A) < 4, uint32_t, A>;  // a world size need not fit into an i8
    if (!a.divide) return x;
    const bool negative = a.divide == divide_signed && x >> (8 * sizeof(A) - 1);
    const A magnitude = negative ? static_cast<A>(0 - x) : x;
    const A quotient = static_cast<A>(magnitude / static_cast<Wide>(a.factor));
    return negative ? static_cast<A>(0 - quotient) : quotient;
  } else if constexpr (op == ReduceOp::sum) {
    if (a.divide) return x / static_cast<A>(a.factor);
  }
  return x;
}

// Integer division is long code, which vectors would repeat for each element: the average of integers is
// computed one by one.
template <class T>
inline constexpr bool divides_one_by_one = std::is_integral_v<T>;

// N elements of T in 16 bytes (or 8: the payload of one message word pair).
template <class T, int nbytes = 16>
struct Pack {
  static constexpr int size = nbytes / static_cast<int>(sizeof(T));
  T element[size];
};

template <class T, int nbytes, class Raw>
PC_FN Pack<T, nbytes> unpack(const Raw& raw) {
  static_assert(sizeof(Raw) == nbytes);
  Pack<T, nbytes> pack;
  std::memcpy(&pack, &raw, nbytes);
  return pack;
}
template <class Raw, class T, int nbytes>
PC_FN Raw repack(const Pack<T, nbytes>& pack) {
  static_assert(sizeof(Raw) == nbytes);
  Raw raw;
  std::memcpy(&raw, &pack, nbytes);
  return raw;
}

}  // namespace pycomm::cuda
