// select.cc -- see select.h. The thresholds are from benchmarks/results; the machine is named beside each.
#include "select.h"

#include "../transport/layout.h"

namespace pycomm {

namespace {

constexpr size_t KiB = 1 << 10, MiB = 1 << 20;

// Steps of the staged pipelines. Small enough to stay in a core's L2 (2 MiB) with both halves, large enough that the flags
// of a step cost nothing. With more ranks than cores every step costs a switch of processes: take all the staging there is.
constexpr size_t block_free_cores = 256 * KiB;
constexpr size_t block_oversubscribed = 4 * MiB;

// The kernel copies from page to page: fast while the source is in cache, slow from memory, where the staged
// pipeline reads with the hardware prefetcher running.
constexpr size_t kernel_from = 32 * KiB;
constexpr size_t kernel_until = 2 * MiB;

constexpr size_t one_shot_staged_until = 16 * KiB;  // all_reduce: every rank reduces everything

}  // namespace

bool has_algorithm(OpKind kind, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::automatic: return true;
    case Algorithm::one_shot: return kind == OpKind::all_reduce;
    case Algorithm::two_shot: return kind == OpKind::all_reduce || kind == OpKind::reduce;
    case Algorithm::ring: return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::all_gather;
    case Algorithm::staged: return kind != OpKind::all_reduce && kind != OpKind::reduce && kind != OpKind::barrier;
    case Algorithm::direct: return kind != OpKind::barrier;
  }
  return false;
}

bool fits_payload(OpKind kind, size_t nbytes, int world_size) {
  bool per_peer = kind == OpKind::reduce_scatter || kind == OpKind::all_to_all || kind == OpKind::scatter;
  return nbytes * (per_peer ? world_size : 1) <= slot_payload_bytes;
}

Choice select(OpKind kind, size_t nbytes, const Situation& s, Algorithm requested) {
  const size_t block = s.oversubscribed ? block_oversubscribed : block_free_cores;
  const Algorithm staged = kind == OpKind::all_reduce || kind == OpKind::reduce ? Algorithm::two_shot : Algorithm::staged;
  if (requested != Algorithm::automatic) return {requested, block, "asked for by the caller or PYCOMM_ALGORITHM"};
  if (s.mapped) return {Algorithm::direct, 0, "peers' buffers are addressable: one pass, no staging"};
  if (kind == OpKind::all_reduce && nbytes <= one_shot_staged_until) return {Algorithm::one_shot, block, "small: one exchange, every rank reduces all"};
  if (s.kernel_reads && nbytes >= kernel_from && nbytes <= kernel_until)
    return {Algorithm::direct, 0, "the kernel copies straight from the peers while their data are in cache"};
  return {staged, block, "streams through halves of shared memory that stay in cache"};
}

}  // namespace pycomm
