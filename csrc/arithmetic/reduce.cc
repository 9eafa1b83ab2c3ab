// reduce.cc -- maps (dtype, op) to the few kernels there are, and picks the SIMD level.
//
//   complex sum, avg, premul_sum   the kernel of the real type, on twice the count
//   integer sum, product           unsigned, as wrapping does not see the sign
//   integer avg                    sum, then a pass that divides in place
//   integer band, bor, bxor        bytes
//   bool                           logical or / and / xor, on bytes made 0 or 1
//   complex product                the scalar loop below: too rare for shuffles of every width
#include "reduce.h"

#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "families.h"
#include "float_mode.h"
#include "kernels.h"

namespace pycomm {
namespace {

struct Level {
  const char* name;
  Kernel (*find_kernel)(DType, ReduceOp);
};

constexpr Level levels[] = {
    {"baseline", find_kernel_baseline},
#if defined(__x86_64__)
    {"avx2", find_kernel_avx2},
    {"avx512", find_kernel_avx512},
#endif
};

std::atomic<int> limit_{2};

int supported_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return 0;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
             ? 2
             : 1;
#else
  return 0;
#endif
}

const Level& current_level() {
  static const int supported = supported_level();
  int limit = limit_.load(std::memory_order_relaxed);
  return levels[limit < supported ? limit : supported];
}

template <class T>
T load(const void* p, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void divide(void* out, size_t count, double factor) {
  using Wide = std::conditional_t<sizeof(T) == 8, T, int64_t>;  // a world size need not fit into an i8
  const Wide divisor = static_cast<Wide>(factor);
  for (size_t i = 0; i < count; i++) {
    T quotient = static_cast<T>(load<T>(out, i) / divisor);
    std::memcpy(static_cast<char*>(out) + i * sizeof(T), &quotient, sizeof(T));
  }
}

void divide_integers(DType dtype, void* out, size_t count, double factor) {
  switch (dtype) {
    case DType::i8: return divide<int8_t>(out, count, factor);
    case DType::i16: return divide<int16_t>(out, count, factor);
    case DType::i32: return divide<int32_t>(out, count, factor);
    case DType::i64: return divide<int64_t>(out, count, factor);
    case DType::u8: return divide<uint8_t>(out, count, factor);
    case DType::u16: return divide<uint16_t>(out, count, factor);
    case DType::u32: return divide<uint32_t>(out, count, factor);
    default: return divide<uint64_t>(out, count, factor);
  }
}

// (a + bi)(c + di) as written, without C99's recovery of infinities from NaN.
template <class T>
void complex_product(const void* const* srcs, int num_srcs, void* out, size_t count) {
  for (size_t i = 0; i < count; i++) {
    T acc[2] = {load<T>(srcs[0], 2 * i), load<T>(srcs[0], 2 * i + 1)};
    for (int s = 1; s < num_srcs; s++) {
      const T re = load<T>(srcs[s], 2 * i), im = load<T>(srcs[s], 2 * i + 1);
      const T next_re = acc[0] * re - acc[1] * im;
      acc[1] = acc[0] * im + acc[1] * re;
      acc[0] = next_re;
    }
    for (T& part : acc) part = part == part ? part : std::numeric_limits<T>::quiet_NaN();
    std::memcpy(static_cast<char*>(out) + i * sizeof acc, acc, sizeof acc);
  }
}

// Not inlined: no arithmetic of it may move out of the scope of the mode.
[[gnu::noinline]] void reduce_in_this_mode(const Arithmetic& arithmetic, const void* const* srcs,
                                           int num_srcs, void* out, size_t count) {
  const auto [dtype, op, factor] = arithmetic;
  DType kernel_dtype = dtype;
  ReduceOp kernel_op = op;
  size_t kernel_count = count;
  switch (family_of(dtype)) {
    case Family::complex:
      if (op == ReduceOp::product) {
        if (dtype == DType::c64) return complex_product<float>(srcs, num_srcs, out, count);
        return complex_product<double>(srcs, num_srcs, out, count);
      }
      kernel_dtype = dtype == DType::c64 ? DType::f32 : DType::f64;
      kernel_count = 2 * count;
      break;
    case Family::integer:
      if (op == ReduceOp::avg) kernel_op = ReduceOp::sum;
      if (is_bitwise(op)) {
        kernel_dtype = DType::u8;
        kernel_count = count * size_of(dtype);
      } else if (op != ReduceOp::min && op != ReduceOp::max) {
        kernel_dtype = unsigned_of(dtype);
      }
      break;
    case Family::boolean: kernel_op = logical_of(op); break;
    default: break;
  }
  current_level().find_kernel(kernel_dtype, kernel_op)(srcs, num_srcs, out, kernel_count, factor);
  if (op == ReduceOp::avg && family_of(dtype) == Family::integer) divide_integers(dtype, out, count, factor);
}

}  // namespace

bool reduce_supported(DType dtype, ReduceOp op) {
  switch (family_of(dtype)) {
    case Family::floating: return !is_bitwise(op);
    case Family::integer: return op != ReduceOp::premul_sum;
    case Family::boolean: return op != ReduceOp::premul_sum && op != ReduceOp::avg;
    case Family::complex: return op <= ReduceOp::product;
    default: return false;
  }
}

void reduce(const Arithmetic& arithmetic, const void* const* srcs, int num_srcs, void* out, size_t count) {
  if (!reduce_supported(arithmetic.dtype, arithmetic.op)) {
    throw std::invalid_argument(std::string("reduce: ") + to_string(arithmetic.op) + " is not defined for " +
                                to_string(arithmetic.dtype) + ". Cast the tensor, or use another op.");
  }
  const StandardFloatMode mode;  // float_mode.h, [Note: the mode of a thread]
  reduce_in_this_mode(arithmetic, srcs, num_srcs, out, count);
}

const char* simd_level() { return current_level().name; }

void set_simd_limit(const char* limit) {
  if (limit == nullptr) {
    limit_ = 2;
    return;
  }
  constexpr const char* names[] = {"baseline", "avx2", "avx512"};
  for (int i = 0; i < 3; i++) {
    if (std::strcmp(limit, names[i]) == 0) {
      limit_ = i;
      return;
    }
  }
  throw std::invalid_argument(std::string("set_simd_limit: '") + limit +
                              "' is none of baseline, avx2, avx512.");
}

}  // namespace pycomm
