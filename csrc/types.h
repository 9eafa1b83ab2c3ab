// types.h -- the vocabulary of the runtime: element types, reduce operations, operation kinds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pycomm {

enum class DType : uint8_t {
  f64,
  f32,
  f16,
  bf16,
  i8,
  u8,
  i16,
  u16,
  i32,
  u32,
  i64,
  u64,
  boolean,
  c64,
  c128,          // complex of two f32, two f64
  f8_e4m3fn,
  f8_e5m2,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  f8_e8m0fnu,  // moved, never reduced
};
inline constexpr int num_dtypes = 20;

enum class ReduceOp : uint8_t { sum, avg, premul_sum, product, min, max, band, bor, bxor };
inline constexpr int num_reduce_ops = 9;

enum class OpKind : uint8_t {
  none,
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  barrier,
  send,
  recv,
  alloc,
};
inline constexpr int num_op_kinds = 13;

// Bytes of one element.
inline constexpr size_t size_of(DType dtype) {
  constexpr uint8_t sizes[num_dtypes] = {8, 4, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1, 8, 16, 1, 1, 1, 1, 1};
  return sizes[static_cast<int>(dtype)];
}

inline const char* to_string(DType dtype) {
  constexpr const char* names[num_dtypes] = {
      "f64",  "f32",       "f16",     "bf16",        "i8",          "u8",        "i16",
      "u16",  "i32",       "u32",     "i64",         "u64",         "bool",      "c64",
      "c128", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz", "f8_e8m0fnu"};
  int i = static_cast<int>(dtype);
  return i < num_dtypes ? names[i] : "?";
}

inline const char* to_string(ReduceOp op) {
  constexpr const char* names[num_reduce_ops] = {"sum", "avg",  "premul_sum", "product", "min",
                                                 "max", "band", "bor",        "bxor"};
  int i = static_cast<int>(op);
  return i < num_reduce_ops ? names[i] : "?";
}

inline const char* to_string(OpKind kind) {
  constexpr const char* names[] = {"none",           "all_reduce", "reduce", "broadcast", "all_gather",
                                   "reduce_scatter", "all_to_all", "gather", "scatter",   "barrier",
                                   "send",           "recv",       "alloc"};
  int i = static_cast<int>(kind);
  return i < num_op_kinds ? names[i] : "?";
}

}  // namespace pycomm
