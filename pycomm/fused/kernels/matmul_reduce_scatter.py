"""out = activation(this rank's rows of (sum over ranks of a @ b) + bias): partial tiles travel while others
are multiplied.

    programs        0 .. PRODUCERS-1                                    .. + REDUCERS
    rank r          partial tiles of rank r+1's rows, then r+2's, ..,
                    its own last: each into the staging of the rank
                    that owns the rows, then flag[r][slot] there
                                                                        for each own tile: wait for
                                                                        flag[0..n-1][slot], add the n tiles in
                                                                        order of rank in fp32, bias,
                                                                        activation, out

    staging of a rank:   [ from rank 0: slot 0 | slot 1 | .. ] [ from rank 1: slot 0 | .. ] ..
                         a slot is a whole tile, block_m x block_n, stored densely: no edge to mask

Every rank begins with other rows, so that at any time different owners are written to. Producers wait for
nobody; reducers wait only for producers, whose ids are lower.

Cost per rank: 2 M N K flops, (n-1)/n M N elements sent in the dtype of the result (sums are in fp32); the
reducers read M N and write M N / n. Exposed are the last reductions. Staging 2 M N. The order of the sum is
fixed by rank: the bits are equal from run to run.
Sources: Triton-distributed and Flux for the tile-wise scatter; separate reducers instead of atomics, whose
order would vary.
"""

import triton
import triton.language as tl

from pycomm.fused.kernels.signal import (
    DATA,
    OF_A_RANK,
    begin,
    finish,
    flag_of,
    meet,
    post,
    staging_of,
    wait_for,
)
from pycomm.fused.kernels.tile import (
    inside,
    multiply,
    narrow,
    place,
    spread,
    store_tile,
    sum_of_partials,
    wide,
)


@triton.jit
def send_tile(z, table, staging, peer, rank, slot, slots, epoch, TILE: tl.constexpr):
    """Puts this rank's partial tile into a slot of the peer's staging and tells it."""
    size: tl.constexpr = TILE.block_m * TILE.block_n
    target = staging_of(table, peer, staging, TILE.wire) + (wide(rank) * slots + slot) * size
    tl.store(tl.multiple_of(target, 16) + inside(TILE), narrow(z, TILE.wire, TILE.upcast))
    post(flag_of(table, peer, staging, rank * slots + slot), epoch)


@triton.jit
def sum_when_here(group, staging, partials, item, slots, epoch, WORLD: tl.constexpr, TILE: tl.constexpr):
    """Waits for the tiles of all ranks for an item, one slot for each panel, and returns their sums over
    ranks, in fp32; without a second panel zeros. group: (table, local, record, limit, rank).
    """
    table, local, record, limit, rank = group
    shape: tl.constexpr = (TILE.block_m, TILE.block_n)
    PANELS: tl.constexpr = TILE.panels
    for source in range(WORLD):
        for panel in range(PANELS):
            flag = flag_of(table, rank, staging, source * slots + item * PANELS + panel)
            wait_for(flag, epoch, local, record, limit, source, DATA)
    z = sum_of_partials(partials, item * PANELS, slots, WORLD, TILE)
    z_up = tl.zeros(shape, tl.float32)
    if PANELS == 2:
        z_up = sum_of_partials(partials, item * PANELS + 1, slots, WORLD, TILE)
    return z, z_up


@triton.jit(do_not_specialize=OF_A_RANK)
def matmul_reduce_scatter(
    a, b, bias, out, z_out, table, local, record, spans,
    fingerprint, limit, rank, outer, n, k, most_rows, staging_offset, half,
    stride_am, stride_ak, stride_bk, stride_bn,
    WORLD: tl.constexpr, PRODUCERS: tl.constexpr, REDUCERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """a: (outer * full, k); b: (k, panels * n); out: this rank's rows, dense; spans, staging_offset, half as
    in all_gather_matmul.

    Slots: the tiles of an owner in the order of `place` over (row_tiles, column_tiles), one for each
    panel.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    PANELS: tl.constexpr = TILE.panels
    pid = tl.program_id(0)
    epoch = begin(table, local, fingerprint, rank, WORLD)
    staging = staging_offset + wide(epoch & 1) * half
    full = tl.load(spans + WORLD)
    row_tiles, column_tiles = tl.cdiv(most_rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    per_rank = row_tiles * column_tiles
    slots = per_rank * PANELS
    if pid < PRODUCERS:
        for index in range(pid, WORLD * slots, PRODUCERS):
            owner = (rank + 1 + index // slots) % WORLD
            slot = index % slots
            tile_m, tile_n = place(slot // PANELS, row_tiles, column_tiles, TILE.group_m)
            first = tl.load(spans + owner)
            period = tl.load(spans + owner + 1) - first
            if tile_m * BLOCK_M < outer * period:
                rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
                columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                panel = slot % PANELS * n
                z, _ = multiply(
                    a, spread(rows, period, full, first) * stride_am, rows < outer * period,
                    first + tile_m * BLOCK_M, stride_ak, b, panel + columns, panel + tile_n * BLOCK_N,
                    panel + n, k, stride_bk, stride_bn, 1, TILE.a_mode, TILE,
                )  # fmt: skip
                send_tile(z, table, staging, owner, rank, slot, slots, epoch, TILE)
    else:
        rows_here = outer * (tl.load(spans + rank + 1) - tl.load(spans + rank))
        partials = staging_of(table, rank, staging, TILE.wire)
        for index in range(pid - PRODUCERS, per_rank, REDUCERS):
            tile_m, tile_n = place(index, row_tiles, column_tiles, TILE.group_m)
            if tile_m * BLOCK_M < rows_here:
                group = (table, local, record, limit, rank)
                z, z_up = sum_when_here(group, staging, partials, index, slots, epoch, WORLD, TILE)
                rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
                columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                store_tile(z, z_up, bias, out, z_out, rows.to(tl.int64), rows < rows_here, columns, n, TILE)
    if pid == tl.num_programs(0) - 1:
        meet(table, local, record, limit, fingerprint, rank, epoch, WORLD)
    finish(local, epoch)
