"""out = activation(all_gather(a) @ b + bias): pieces of a travel while others are multiplied.

    programs   0 .. PUSHERS-1               .. + MULTIPLIERS              .. + KEEPERS (only if the
                                                                          gathered a is wanted)
    rank r     own a ─ push to r-1, r-2,
               .. ─► staging of the peer,
               then flag[r][tile row] there
                                            out tiles of r's own rows,
                                            read from a
                                            out tiles of rank r+1's
                                            rows: wait for flag[r+1]
                                            [tile row], read from
                                            staging
                                            ..                            wait likewise, copy to `kept`

    staging of rank 0, 3 ranks:   [ own: not used | rows of rank 1 | rows of rank 2 ]
                                  one half; a piece has most_rows rows
    flags                         [r][i]: tile row i (block_m rows) of rank r's piece is in the staging

Everyone pushes first to the rank that will need it first, and multiplies first what is here. Pushers wait for
nobody; multipliers wait only for pushers, whose ids are lower.

Cost per rank: (n-1) pieces sent and received, once; 2 M N K flops. Exposed is what the first piece needs
beyond the product of the own rows. Staging 2 n pieces. Pieces are read back by pointers and not by TMA:
Triton puts no fence between the acquire and a read by the asynchronous proxy. Sources: Flux (Chang et al.
2024) for tiles that wait for pieces; the push is in the same launch here, since a copy engine's flags would
need stream memory operations that a graph cannot renumber.
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
from pycomm.fused.kernels.tile import multiply, place, spread, store_tile, wide


@triton.jit
def copy_dense(target, source, count, UNIT: tl.constexpr, COPY: tl.constexpr):
    """count elements, a multiple of UNIT = 16 bytes; both at multiples of 16 bytes. COPY units at a time."""
    units = tl.arange(0, COPY)
    within = tl.arange(0, UNIT)
    for first in range(0, count // UNIT, COPY):
        offsets = (first + units)[:, None] * UNIT + within[None, :]
        mask = (first + units < count // UNIT)[:, None] & (within >= 0)[None, :]
        tl.store(target + offsets, tl.load(source + offsets, mask), mask)


@triton.jit
def push(
    a, table, staging, first_item, items, step_items, row_tiles, rows, k, most_rows, rank, epoch,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Tile rows of this rank's piece to the peers, from item first_item on in steps; items are ordered by
    when they are needed.
    """
    for item in range(first_item, items, step_items):
        tile = item % row_tiles
        peer = (rank + WORLD - 1 - item // row_tiles) % WORLD
        here = min(BLOCK_M, rows - tile * BLOCK_M)
        if here > 0:
            count = here * k
            first = wide(tile) * BLOCK_M * k
            target = staging_of(table, peer, staging, a.dtype.element_ty) + wide(rank) * most_rows * k + first
            # The last piece may end within 16 bytes: the host has padded both sides to whole units.
            copy_dense(
                tl.multiple_of(target, 16),
                tl.multiple_of(a + first, 16),
                (count + UNIT - 1) // UNIT * UNIT,
                UNIT,
                COPY,
            )
            post(flag_of(table, peer, staging, rank * row_tiles + tile), epoch)


@triton.jit
def source_of(a, table, staging, source, rank, most_rows, k):
    """Where the rows of rank `source` are read: this rank's own from a, others' from the staging."""
    own = a.to(tl.int64)
    piece = (
        tl.load(table + rank)
        + staging
        + wide(source) * most_rows * k * (a.dtype.element_ty.primitive_bitwidth // 8)
    )
    return tl.multiple_of(tl.where(source == rank, own, piece).to(tl.pointer_type(a.dtype.element_ty)), 16)


@triton.jit(do_not_specialize=OF_A_RANK)
def all_gather_matmul(
    a, b, bias, out, z_out, kept, table, local, record, spans,
    fingerprint, limit, rank, outer, n, k, most_rows, staging_offset, half, stride_bk, stride_bn,
    WORLD: tl.constexpr, PUSHERS: tl.constexpr, MULTIPLIERS: tl.constexpr, KEEPERS: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """a: (rows of this rank, k) dense, 16-byte aligned, padded to whole 16 bytes; most_rows: of the longest
    piece, rounded up so that pieces in staging are aligned; spans: where pieces begin along the gathered
    dimension, in rows, WORLD + 1 of them; half: bytes of a half of the staging, which begins at
    staging_offset."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    pid = tl.program_id(0)
    epoch = begin(table, local, fingerprint, rank, WORLD)
    staging = staging_offset + wide(epoch & 1) * half
    full = tl.load(spans + WORLD)
    row_tiles, column_tiles = tl.cdiv(most_rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    if pid < PUSHERS:
        rows_here = outer * (tl.load(spans + rank + 1) - tl.load(spans + rank))
        push(
            a, table, staging, pid, (WORLD - 1) * row_tiles, PUSHERS, row_tiles, rows_here, k, most_rows,
            rank, epoch, WORLD, BLOCK_M, UNIT, COPY,
        )  # fmt: skip
    elif pid < PUSHERS + MULTIPLIERS:
        per_rank = row_tiles * column_tiles
        for index in range(pid - PUSHERS, WORLD * per_rank, MULTIPLIERS):
            source = (rank + index // per_rank) % WORLD
            tile_m, tile_n = place(index % per_rank, row_tiles, column_tiles, TILE.group_m)
            first = tl.load(spans + source)
            period = tl.load(spans + source + 1) - first
            if tile_m * BLOCK_M < outer * period:
                if source != rank:
                    flag = flag_of(table, rank, staging, source * row_tiles + tile_m)
                    wait_for(flag, epoch, local, record, limit, source, DATA)
                rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
                columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                row_mask = rows < outer * period
                z, z_up = multiply(
                    source_of(a, table, staging, source, rank, most_rows, k), rows.to(tl.int64) * k, row_mask,
                    0, 1, b, columns, tile_n * BLOCK_N, n, k, stride_bk, stride_bn, TILE.panels, 0, TILE,
                )  # fmt: skip
                out_rows = spread(rows, period, full, first)
                store_tile(z, z_up, bias, out, z_out, out_rows, row_mask, columns, n, TILE)
    elif KEEPERS > 0:
        keep(
            a, kept, (table, local, record, limit, rank), spans, (outer, full, most_rows, row_tiles), k,
            staging, pid - PUSHERS - MULTIPLIERS, epoch, WORLD, KEEPERS, TILE,
        )  # fmt: skip
    if pid == tl.num_programs(0) - 1:
        meet(table, local, record, limit, fingerprint, rank, epoch, WORLD)
    finish(local, epoch)


@triton.jit
def keep(
    a, kept, group, spans, counts, k, staging, first_item, epoch,
    WORLD: tl.constexpr, KEEPERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copies all pieces to `kept`, (outer * full, k) in the order of the gathered tensor."""
    table, local, record, limit, rank = group
    outer, full, most_rows, row_tiles = counts
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_K: tl.constexpr = TILE.block_k
    ks = tl.arange(0, BLOCK_K)
    for item in range(first_item, WORLD * row_tiles, KEEPERS):
        source = (rank + item // row_tiles) % WORLD
        tile = item % row_tiles
        first = tl.load(spans + source)
        period = tl.load(spans + source + 1) - first
        if tile * BLOCK_M < outer * period:
            if source != rank:
                flag = flag_of(table, rank, staging, source * row_tiles + tile)
                wait_for(flag, epoch, local, record, limit, source, DATA)
            rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            taken = (
                source_of(a, table, staging, source, rank, most_rows, k)
                + rows[:, None].to(tl.int64) * k
                + ks[None, :]
            )
            placed = kept + spread(rows, period, full, first)[:, None] * k + ks[None, :]
            for step in range(0, k, BLOCK_K):
                mask = (rows < outer * period)[:, None] & (ks < k - step)[None, :]
                tl.store(placed + step, tl.load(taken + step, mask), mask)
