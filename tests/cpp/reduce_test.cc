// reduce_test.cc -- csrc/arithmetic against a scalar oracle; every SIMD level equals the first bit by bit.
//
//   g++ -O3 -std=c++20 tests/cpp/reduce_test.cc csrc/arithmetic/*.cc -o reduce_test && ./reduce_test [bench]
//
// The oracle works on one element at a time and shares nothing with the kernels: it converts 16-bit floats
// through double with ldexp and nearbyint.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../../csrc/arithmetic/reduce.h"

using namespace pycomm;

namespace {

long passed = 0, failed = 0;

void check(bool ok, const std::string& what) {
  (ok ? passed : failed)++;
  if (!ok && failed <= 20) std::printf("FAILED %s\n", what.c_str());
}

// ---- 16-bit floats: `digits` bits of mantissa, `bias` of the exponent
// ----------------------------------------------------------

template <int digits, int bias>
struct Small {
  uint16_t bits;
  static constexpr int max_exponent = 2 * bias + 1;

  operator float() const {
    int exponent = (bits & 0x7fff) >> digits, mantissa = bits & ((1 << digits) - 1);
    double magnitude = exponent == max_exponent ? (mantissa ? NAN : INFINITY)
                       : exponent ? std::ldexp(mantissa + (1 << digits), exponent - bias - digits)
                                  : std::ldexp(mantissa, 1 - bias - digits);
    return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
  }

  static Small round(float value) {
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    constexpr uint16_t infinity = max_exponent << digits;
    if (std::isnan(value)) return {static_cast<uint16_t>(infinity | 1 << (digits - 1))};
    double magnitude = std::fabs(static_cast<double>(value));
    if (std::isinf(magnitude)) return {static_cast<uint16_t>(sign | infinity)};
    if (magnitude == 0) return {sign};
    int exponent = std::max(std::ilogb(magnitude), 1 - bias);
    double steps = std::nearbyint(std::ldexp(magnitude, digits - exponent));  // units in the last place
    int encoded = static_cast<int>(steps) + ((exponent + bias - 1) << digits);
    return {static_cast<uint16_t>(sign | std::min<int>(encoded, infinity))};
  }
};
using F16 = Small<10, 15>;
using BF16 = Small<7, 127>;

template <class T>
constexpr bool is_small = std::is_same_v<T, F16> || std::is_same_v<T, BF16>;
template <class T>
constexpr bool is_float = is_small<T> || std::is_floating_point_v<T>;
template <class T>
using Acc = std::conditional_t<is_small<T>, float, T>;

template <class T>
T at(const void* p, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void put(void* p, size_t i, T value) {
  std::memcpy(static_cast<char*>(p) + i * sizeof(T), &value, sizeof(T));
}

// ---- oracle
// ------------------------------------------------------------

template <class A>
A multiply(A a, A b) {
  if constexpr (std::is_integral_v<A>)
    return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  volatile A product = a * b;  // volatile: must not become part of a fused multiply-add
  return product;
}

template <class A>
A add(A a, A b) {
  if constexpr (std::is_integral_v<A>)
    return static_cast<A>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  return a + b;
}

template <class A>
A combine(ReduceOp op, A a, A b) {
  switch (op) {
    case ReduceOp::product: return multiply(a, b);
    case ReduceOp::min: return a != a ? a : b != b ? b : a < b ? a : b;
    case ReduceOp::max: return a != a ? a : b != b ? b : a > b ? a : b;
    default: break;
  }
  if constexpr (std::is_integral_v<A>) {
    if (op == ReduceOp::band) return a & b;
    if (op == ReduceOp::bor) return a | b;
    if (op == ReduceOp::bxor) return a ^ b;
  }
  return add(a, b);
}

template <class A>
A one_nan(A a) {
  return a == a ? a : std::numeric_limits<A>::quiet_NaN();
}

template <class T>
void oracle(ReduceOp op, const std::vector<const void*>& srcs, void* out, size_t count, double factor) {
  using A = Acc<T>;
  for (size_t i = 0; i < count; i++) {
    auto source = [&](size_t s) {
      A value = static_cast<A>(at<T>(srcs[s], i));
      return op == ReduceOp::premul_sum ? multiply(value, static_cast<A>(factor)) : value;
    };
    A acc = source(0);
    for (size_t s = 1; s < srcs.size(); s++) acc = combine(op, acc, source(s));
    if (op == ReduceOp::avg) {
      if constexpr (std::is_floating_point_v<A>) acc /= static_cast<A>(factor);
      else
        acc = static_cast<A>(
            std::is_signed_v<A> ? static_cast<A>(static_cast<int64_t>(acc) / static_cast<int64_t>(factor))
                                : static_cast<A>(static_cast<uint64_t>(acc) / static_cast<uint64_t>(factor)));
    }
    if constexpr (is_small<T>) put(out, i, T::round(acc));
    else put(out, i, one_nan(acc));
  }
}

void oracle_bool(ReduceOp op, const std::vector<const void*>& srcs, void* out, size_t count) {
  for (size_t i = 0; i < count; i++) {
    int set = 0, n = static_cast<int>(srcs.size());
    for (auto* src : srcs) set += at<uint8_t>(src, i) != 0;
    bool all = op == ReduceOp::product || op == ReduceOp::min || op == ReduceOp::band;
    put<uint8_t>(out, i, op == ReduceOp::bxor ? set & 1 : all ? set == n : set > 0);
  }
}

template <class T>
void oracle_complex(ReduceOp op, const std::vector<const void*>& srcs, void* out, size_t count,
                    double factor) {
  if (op != ReduceOp::product) return oracle<T>(op, srcs, out, 2 * count, factor);
  for (size_t i = 0; i < count; i++) {
    T re = at<T>(srcs[0], 2 * i), im = at<T>(srcs[0], 2 * i + 1);
    for (size_t s = 1; s < srcs.size(); s++) {
      T c = at<T>(srcs[s], 2 * i), d = at<T>(srcs[s], 2 * i + 1);
      T next = multiply(re, c) - multiply(im, d);
      im = multiply(re, d) + multiply(im, c);
      re = next;
    }
    put(out, 2 * i, one_nan(re));
    put(out, 2 * i + 1, one_nan(im));
  }
}

void oracle(DType dtype, ReduceOp op, const std::vector<const void*>& srcs, void* out, size_t count,
            double factor) {
  switch (dtype) {
    case DType::f64: return oracle<double>(op, srcs, out, count, factor);
    case DType::f32: return oracle<float>(op, srcs, out, count, factor);
    case DType::f16: return oracle<F16>(op, srcs, out, count, factor);
    case DType::bf16: return oracle<BF16>(op, srcs, out, count, factor);
    case DType::i8: return oracle<int8_t>(op, srcs, out, count, factor);
    case DType::u8: return oracle<uint8_t>(op, srcs, out, count, factor);
    case DType::i16: return oracle<int16_t>(op, srcs, out, count, factor);
    case DType::u16: return oracle<uint16_t>(op, srcs, out, count, factor);
    case DType::i32: return oracle<int32_t>(op, srcs, out, count, factor);
    case DType::u32: return oracle<uint32_t>(op, srcs, out, count, factor);
    case DType::i64: return oracle<int64_t>(op, srcs, out, count, factor);
    case DType::u64: return oracle<uint64_t>(op, srcs, out, count, factor);
    case DType::boolean: return oracle_bool(op, srcs, out, count);
    case DType::c64: return oracle_complex<float>(op, srcs, out, count, factor);
    default: return oracle_complex<double>(op, srcs, out, count, factor);
  }
}

// ---- inputs: mostly moderate values, some NaNs of any payload, extremes and arbitrary bits
// --------------------------------------

template <class T>
void fill(char* p, size_t count, std::mt19937_64& random) {
  for (size_t i = 0; i < count; i++) {
    uint64_t kind = random() % 64, bits = random();
    T value;
    std::memcpy(&value, &bits, sizeof value);
    if constexpr (is_float<T>) {
      const float extremes[] = {0.0f, -0.0f, INFINITY, -INFINITY, 1e-7f, 65504.0f, -65520.0f, -3e38f};
      auto convert = [](float x) {
        if constexpr (is_small<T>) return T::round(x);
        else return static_cast<T>(x);
      };
      if (kind == 0) {
        T infinity = convert(INFINITY);
        uint64_t exponent = 0;
        std::memcpy(&exponent, &infinity, sizeof infinity);
        bits |= exponent;
        std::memcpy(&value, &bits, sizeof value);
      } else if (kind > 3) {
        value = convert(kind < 8 ? extremes[bits >> 61]
                                 : static_cast<float>(static_cast<int64_t>(bits % 4001) - 2000) / 512);
      }
    } else if (kind < 8) {
      value = bits >> 63 ? std::numeric_limits<T>::max() : std::numeric_limits<T>::min();
    }
    put(p, i, value);
  }
}

void fill(DType dtype, char* p, size_t count, std::mt19937_64& random) {
  switch (dtype) {
    case DType::f64: return fill<double>(p, count, random);
    case DType::f32: return fill<float>(p, count, random);
    case DType::f16: return fill<F16>(p, count, random);
    case DType::bf16: return fill<BF16>(p, count, random);
    case DType::c64: return fill<float>(p, 2 * count, random);
    case DType::c128: return fill<double>(p, 2 * count, random);
    case DType::boolean:
      for (size_t i = 0; i < count; i++) p[i] = random() % 2 ? static_cast<char>(random()) : 0;
      return;
    default: return fill<int8_t>(p, count * size_of(dtype), random);
  }
}

// ---- the table
// ------------------------------------------------------------

std::vector<const char*> levels() {
  std::vector<const char*> found;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    set_simd_limit(name);
    if (std::strcmp(simd_level(), name) == 0) found.push_back(name);
  }
  return found;
}

struct Shape {
  int num_srcs;
  size_t count;
  int shift;  // bytes of misalignment
  int alias;  // out is sources[alias], or separate where this is -1
};

// One shape on every level.
void test_shape(DType dtype, ReduceOp op, Shape shape, double factor, std::mt19937_64& random) {
  const auto [num_srcs, count, shift, alias] = shape;
  constexpr size_t margin = 16;
  const size_t nbytes = count * size_of(dtype);
  std::vector<std::vector<char>> inputs(num_srcs, std::vector<char>(nbytes + 2 * margin, 0x5a));
  for (int s = 0; s < num_srcs; s++)
    fill(dtype, inputs[s].data() + (shift + 3 * s * (shift != 0)) % margin, count, random);
  std::vector<const void*> srcs;
  for (int s = 0; s < num_srcs; s++)
    srcs.push_back(inputs[s].data() + (shift + 3 * s * (shift != 0)) % margin);
  std::vector<char> expected(nbytes + 1), first;
  oracle(dtype, op, srcs, expected.data(), count, factor);

  for (const char* level : levels()) {
    set_simd_limit(level);
    std::vector<char> target = alias < 0 ? std::vector<char>(nbytes + 2 * margin, 0x5a) : inputs[alias];
    const size_t offset =
        alias < 0 ? static_cast<size_t>(shift) : static_cast<const char*>(srcs[alias]) - inputs[alias].data();
    std::vector<const void*> level_srcs = srcs;
    if (alias >= 0) level_srcs[alias] = target.data() + offset;
    reduce({dtype, op, factor}, level_srcs.data(), num_srcs, target.data() + offset, count);

    std::string what = std::string(to_string(dtype)) + " " + to_string(op) + " " + level +
                       " num_srcs=" + std::to_string(num_srcs) + " count=" + std::to_string(count) +
                       " shift=" + std::to_string(shift) + " alias=" + std::to_string(alias);
    check(std::memcmp(target.data() + offset, expected.data(), nbytes) == 0,
          what + ": differs from the oracle");
    bool intact = true;
    for (size_t i = 0; i < target.size(); i++)
      intact &= (i >= offset && i < offset + nbytes) || target[i] == 0x5a;
    check(intact, what + ": wrote outside of out");
    std::vector<char> result(target.begin() + offset, target.begin() + offset + nbytes);
    if (first.empty()) first = result;
    check(result == first, what + ": differs from baseline");
  }
}

void test_table() {
  std::mt19937_64 random(7);
  for (int d = 0; d < num_dtypes; d++) {
    for (int o = 0; o < num_reduce_ops; o++) {
      DType dtype = static_cast<DType>(d);
      ReduceOp op = static_cast<ReduceOp>(o);
      if (!reduce_supported(dtype, op)) {
        bool threw = false;
        try {
          reduce({dtype, op}, nullptr, 1, nullptr, 0);
        } catch (const std::invalid_argument&) {
          threw = true;
        }
        check(threw, std::string(to_string(dtype)) + " " + to_string(op) + ": must throw");
        continue;
      }
      for (int num_srcs : {1, 2, 3, 4, 7, 8, 17, 200}) {
        double factor = op == ReduceOp::premul_sum ? 0.3 : num_srcs;
        for (size_t count : {0, 1, 3, 15, 16, 17, 63, 64, 65, 1000}) {
          if (num_srcs == 200 && count != 65) continue;
          test_shape(dtype, op, {num_srcs, count, 0, -1}, factor, random);
          test_shape(dtype, op, {num_srcs, count, 1, -1}, factor, random);
          test_shape(dtype, op, {num_srcs, count, 0, 0}, factor, random);
          test_shape(dtype, op, {num_srcs, count, 5, num_srcs - 1}, factor, random);
        }
      }
    }
  }
}

// Every 16-bit pattern, and sums of two that land on and next to every rounding boundary.
template <class T>
void test_all_patterns(DType dtype) {
  std::vector<uint16_t> a(1 << 16), b(1 << 16), out(1 << 16);
  for (uint32_t shift : {0, 1, 8, 11, 12}) {
    for (uint32_t i = 0; i < a.size(); i++) {
      a[i] = static_cast<uint16_t>(i);
      uint32_t step = shift << (dtype == DType::f16 ? 10 : 7);
      b[i] = static_cast<uint16_t>((i & 0x7fff) > step ? i - step + i % 7 : i % 7);
    }
    std::vector<const void*> srcs = {a.data(), b.data()};
    std::vector<T> expected(1 << 16);
    oracle(dtype, ReduceOp::sum, srcs, expected.data(), a.size(), 1);
    for (const char* level : levels()) {
      set_simd_limit(level);
      reduce({dtype, ReduceOp::sum}, srcs.data(), 2, out.data(), a.size());
      check(std::memcmp(out.data(), expected.data(), 2 * a.size()) == 0,
            std::string("all patterns of ") + to_string(dtype) + " " + level);
    }
  }
}

void test_copy() {
  std::vector<char> src(5000), dst(5000);
  for (size_t i = 0; i < src.size(); i++) src[i] = static_cast<char>(i * 7 + 1);
  for (size_t nbytes : {0, 1, 15, 63, 64, 65, 127, 128, 1000, 4097}) {
    for (size_t shift : {0, 1, 63}) {
      for (bool stream : {false, true}) {
        std::fill(dst.begin(), dst.end(), 0);
        copy(dst.data() + shift, src.data() + 3, nbytes, stream);
        bool ok = std::memcmp(dst.data() + shift, src.data() + 3, nbytes) == 0;
        ok &= dst[shift + nbytes] == 0 && (shift == 0 || dst[shift - 1] == 0);
        check(ok, "copy nbytes=" + std::to_string(nbytes) + " shift=" + std::to_string(shift));
      }
    }
  }
}

// ---- bench: GB/s of one source's bytes (algbw), best of several runs
// ------------------------------------------------------------

template <class Work>
double best_gbps(size_t nbytes, Work work) {
  const int repeats = static_cast<int>((size_t{8} << 20) / nbytes);
  double best = 0;
  for (int run = 0; run < 15; run++) {
    auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; i++) work();
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, 1e-9 * static_cast<double>(nbytes) * repeats / seconds);
  }
  return best;
}

void bench() {
  std::printf("GB/s of nbytes = one source; the kernel moves (num_srcs + 1) times as much\n");
  for (size_t nbytes : {size_t{16} << 10, size_t{1} << 20}) {
    std::vector<char> buffer(9 * (nbytes + 320) + 64, 0);
    char* base = buffer.data() + (-reinterpret_cast<uintptr_t>(buffer.data()) & 63);
    auto block = [&](int i) {
      return base + i * (nbytes + 320);
    };  // 320: no two blocks at the same offset in a page
    std::printf("%7zu bytes  memcpy %6.1f   streamed copy %6.1f\n", nbytes,
                best_gbps(nbytes, [&] { copy(block(8), block(0), nbytes); }),
                best_gbps(nbytes, [&] { copy(block(8), block(0), nbytes, true); }));
    for (const char* level : levels()) {
      for (DType dtype : {DType::f32, DType::bf16, DType::f16, DType::i32, DType::f64}) {
        std::printf("%7zu bytes  %-8s %-4s sum ", nbytes, level, to_string(dtype));
        for (int num_srcs : {2, 4, 8}) {
          const void* srcs[8];
          for (int s = 0; s < num_srcs; s++) srcs[s] = block(s);
          set_simd_limit(level);
          std::printf("  %d srcs %6.1f", num_srcs, best_gbps(nbytes, [&] {
                        reduce({dtype, ReduceOp::sum}, srcs, num_srcs, block(8), nbytes / size_of(dtype));
                      }));
        }
        std::printf("\n");
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "bench") == 0) {
    bench();
    return 0;
  }
  test_table();
  test_all_patterns<F16>(DType::f16);
  test_all_patterns<BF16>(DType::bf16);
  test_copy();
  set_simd_limit(nullptr);
  std::printf("best level %s\n%ld passed, %ld failed\n", simd_level(), passed, failed);
  return failed != 0;
}
