// stress_values.h -- for stress.cc: small integers, exact in every dtype.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../csrc/types.h"

namespace pycomm {

inline unsigned value(unsigned salt, int rank, size_t i) {
  return (salt * 31 + rank * 7 + static_cast<unsigned>(i) * 5) % 11;
}

inline void put(std::byte* at, DType dtype, size_t i, unsigned v) {
  switch (dtype) {
    case DType::f64: reinterpret_cast<double*>(at)[i] = v; break;
    case DType::f32: reinterpret_cast<float*>(at)[i] = static_cast<float>(v); break;
    case DType::i32: reinterpret_cast<int32_t*>(at)[i] = static_cast<int32_t>(v); break;
    default: reinterpret_cast<uint8_t*>(at)[i] = static_cast<uint8_t>(v);
  }
}

inline double get(const std::byte* at, DType dtype, size_t i) {
  switch (dtype) {
    case DType::f64: return reinterpret_cast<const double*>(at)[i];
    case DType::f32: return reinterpret_cast<const float*>(at)[i];
    case DType::i32: return reinterpret_cast<const int32_t*>(at)[i];
    default: return reinterpret_cast<const uint8_t*>(at)[i];
  }
}

}  // namespace pycomm
