// select.cc -- see select.h. The thresholds are from benchmarks/results; the machine is named beside each.
#include "select.h"

#include "../transport/layout.h"

namespace pycomm {

namespace {

constexpr size_t KiB = 1 << 10, MiB = 1 << 20;

// Steps of the staged pipelines. Small enough to stay in a core's L2 (2 MiB) with both halves, large enough
// that the flags of a step cost nothing. With more ranks than cores every step costs a switch of processes:
// take all the staging there is.
constexpr size_t block_free_cores = 256 * KiB;
constexpr size_t block_oversubscribed = 4 * MiB;

// all_reduce above the header's payload: up to here one exchange, after which every rank reduces all, beats
// two.
constexpr size_t one_shot_staged_until = 12 * KiB;

// Direct by the kernel (process_vm_readv/writev) against the staged pipeline, in bytes of a rank's whole
// buffer. It saves a copy and the step-by-step exchanges but pays for system calls and page look-ups, which
// some machines do in a fifth of the copy's time and others in four times. Since staging goes round
// (pipeline.h) it is ahead on the others if the ranks share a cache; between caches a line costs four times
// as much to hand over, and one copy is ahead again (EPYC, Zen 4, 2 cores, L2 1 MiB: docs/log.md,
// 2026-11-23). The other thresholds are from a Xeon (Sapphire Rapids class, 2 cores, L2 2 MiB): 2026-11-21.
struct KernelWins {
  size_t from, until;
};
KernelWins kernel_wins(OpKind kind, const Situation& s) {
  constexpr KernelWins never{1, 0};
  const bool reduces = kind == OpKind::all_reduce || kind == OpKind::reduce || kind == OpKind::reduce_scatter;
  if (s.world_size <= s.cores && !s.kernel_ahead)
    return kind == OpKind::all_gather ? KernelWins{3 * MiB, 32 * MiB} : never;
  if (s.world_size <= s.cores) return {12 * KiB, kind == OpKind::broadcast ? 2 * MiB : 32 * MiB};
  if (kind == OpKind::all_to_all) return {192 * KiB, 64 * MiB};
  if (reduces && s.world_size <= 2 * s.cores) return {192 * KiB, 32 * MiB};
  return never;
}

constexpr const char* measured_here = "the fastest of those measured on this machine";

Access access_of(const Situation& s) {
  return s.mapped ? Access::mapped : s.kernel_reads ? Access::kernel : Access::staging;
}

}  // namespace

bool has_algorithm(OpKind kind, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::automatic: return true;
    case Algorithm::one_shot: return kind == OpKind::all_reduce;
    case Algorithm::two_shot: return kind == OpKind::all_reduce || kind == OpKind::reduce;
    case Algorithm::ring:
      return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::all_gather;
    case Algorithm::staged:
      return kind != OpKind::all_reduce && kind != OpKind::reduce && kind != OpKind::barrier;
    case Algorithm::direct: return kind != OpKind::barrier;
    case Algorithm::copy_engine:
    case Algorithm::multimem: return false;
  }
  return false;
}

bool fits_payload(OpKind kind, size_t nbytes, int world_size) {
  bool per_peer = kind == OpKind::reduce_scatter || kind == OpKind::all_to_all || kind == OpKind::scatter;
  return nbytes * (per_peer ? world_size : 1) <= slot_payload_bytes;
}

Choice select(OpKind kind, size_t nbytes, const Situation& s, Algorithm requested) {
  const size_t block = s.world_size > s.cores ? block_oversubscribed : block_free_cores;
  const Algorithm staged =
      kind == OpKind::all_reduce || kind == OpKind::reduce ? Algorithm::two_shot : Algorithm::staged;
  if (requested != Algorithm::automatic)
    return {requested, block, "asked for by the caller or PYCOMM_ALGORITHM"};
  const bool whole = kind == OpKind::all_reduce || kind == OpKind::reduce || kind == OpKind::broadcast;
  const size_t total = whole ? nbytes : nbytes * s.world_size;
  if (s.tuned && kind <= OpKind::scatter) {
    const Algorithm measured = s.tuned->find(kind, access_of(s), total);
    if (measured != Algorithm::automatic)
      return {measured, measured == Algorithm::direct ? 0 : block, measured_here, true};
  }
  if (s.mapped) return {Algorithm::direct, 0, "peers' buffers are addressable: one pass, no staging"};
  if (kind == OpKind::all_reduce && nbytes <= one_shot_staged_until)
    return {Algorithm::one_shot, block, "small: one exchange, every rank reduces all"};
  const KernelWins wins = kernel_wins(kind, s);
  if (s.kernel_reads && total >= wins.from && total <= wins.until)
    return {Algorithm::direct, 0,
            "the kernel copies straight from the peers, which beats staging in this range"};
  return {staged, block, "streams through halves of shared memory that stay in cache"};
}

}  // namespace pycomm
