// choice.cc -- which algorithm a collective on CUDA tensors uses, and which kernel does its arithmetic. See
// plan.h.
//
// Thresholds marked (unmeasured) are estimates until `make gpu-check` has run: benchmarks/results/.
#include <algorithm>
#include <stdexcept>

#include "../arithmetic/families.h"
#include "plan.h"

namespace pycomm::cuda {

ReductionKey reduction_key(DType dtype, ReduceOp op) {
  const bool sums = op == ReduceOp::sum || op == ReduceOp::avg || op == ReduceOp::premul_sum;
  if (dtype == DType::boolean) return {dtype, logical_of(op)};
  if (is_bitwise(op)) return {DType::u8, op};
  if (sums && dtype == DType::c64) return {DType::f32, ReduceOp::sum};
  if (sums && dtype == DType::c128) return {DType::f64, ReduceOp::sum};
  const bool wraps = family_of(dtype) == Family::integer && (sums || op == ReduceOp::product);
  return {wraps ? unsigned_of(dtype) : dtype, sums ? ReduceOp::sum : op};
}

bool has_cuda_algorithm(OpKind kind, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::automatic: return true;
    case Algorithm::one_shot:
    case Algorithm::multimem:
    case Algorithm::ring: return kind == OpKind::all_reduce;
    case Algorithm::two_shot:
      return kind == OpKind::all_reduce || kind == OpKind::reduce || kind == OpKind::reduce_scatter ||
             kind == OpKind::broadcast;
    case Algorithm::copy_engine: return kind == OpKind::all_gather || kind == OpKind::all_to_all;
    case Algorithm::staged:
    case Algorithm::direct:
      return kind != OpKind::barrier && kind != OpKind::all_reduce && kind != OpKind::reduce &&
             kind != OpKind::reduce_scatter;
  }
  return false;
}

CudaChoice choose(OpKind kind, size_t nbytes, const Shape& shape, const KernelKey& reduction, bool registered,
                  Algorithm requested) {
  constexpr size_t KiB = 1 << 10, MiB = 1 << 20;
  const size_t one_shot_limit = shape.group.words_bytes / 2;
  const bool resident = shape.protocol == Protocol::resident;
  auto kernel = [&](Kernel k) { return has_kernel({k, reduction.dtype, reduction.op}); };
  if (!has_cuda_algorithm(kind, requested))
    throw std::invalid_argument(std::string(to_string(kind)) + " has no algorithm " + to_string(requested) +
                                " for CUDA tensors");
  auto asked = [&](bool possible, const char* otherwise) -> CudaChoice {
    if (possible) return {requested, "asked for by the caller or PYCOMM_ALGORITHM"};
    return {Algorithm::two_shot, otherwise};
  };
  if (nbytes == 0) requested = Algorithm::automatic;  // an empty buffer lies nowhere
  switch (requested) {
    case Algorithm::one_shot:
      return asked(nbytes <= one_shot_limit && kernel(Kernel::one_shot),
                   "too large for one_shot, or of 16-byte elements");
    case Algorithm::ring:
      return asked(resident && shape.world_size() > 1 && kernel(Kernel::ring),
                   "a ring needs neighbours, rounds 16-bit types at each hop, is built for sums, and needs "
                   "resident kernels");
    case Algorithm::multimem:
      if (!shape.multicast || !kernel(Kernel::multimem) || !registered || !resident)
        throw std::invalid_argument(
            "algorithm multimem needs NVSwitch multicast, buffers from pycomm.empty, and the sum of f32, f16 "
            "or bf16");
      return {requested, "asked for by the caller or PYCOMM_ALGORITHM"};
    case Algorithm::copy_engine:
      if (!registered) throw std::invalid_argument("algorithm copy_engine needs buffers from pycomm.empty");
      return {requested, "asked for by the caller or PYCOMM_ALGORITHM"};
    case Algorithm::automatic: break;
    default: return {requested, "asked for by the caller or PYCOMM_ALGORITHM"};
  }
  const Algorithm plain = shape.pointers || registered ? Algorithm::direct : Algorithm::staged;
  switch (kind) {
    case OpKind::all_reduce:
      if (nbytes <= std::min(one_shot_limit, 32 * KiB) && kernel(Kernel::one_shot))
        return {Algorithm::one_shot, "small: data and flag in one word, one trip"};
      return {Algorithm::two_shot, "every rank reduces its part of the buffer"};
    case OpKind::reduce:
    case OpKind::reduce_scatter: return {Algorithm::two_shot, "every rank reduces its part"};
    case OpKind::broadcast:
      if (nbytes > 256 * KiB && shape.world_size() > 2 && !shape.pointers)
        return {Algorithm::two_shot, "large: scattered, then gathered, so that no link carries all"};
      return {plain, "every rank reads from the root"};
    default: break;
  }
  if ((kind == OpKind::all_gather || kind == OpKind::all_to_all) && registered && nbytes >= 4 * MiB)
    return {Algorithm::copy_engine,
            "large and registered: the copy engine leaves the multiprocessors to compute"};
  return {plain, "every rank reads from its peers"};
}

}  // namespace pycomm::cuda
