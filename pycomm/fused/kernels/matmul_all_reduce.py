"""out = activation((sum over ranks of a @ b) + bias) on every rank, in one of two ways.

    one-shot       programs  0 .. PRODUCERS-1          .. + REDUCERS
    (2 ranks,                a partial tile goes to    for each tile: wait for n
     small M N)              the staging of every      tiles, add, bias,
                             rank                      activation, out

    two-shot       programs  0 .. PRODUCERS-1          .. + REDUCERS                .. + FINISHERS
                             partial tile t goes to    for each own tile: wait      for each tile: wait
                             its owner, rank t % n     for n, add, bias,            for its result, out
                                                       activation, send the
                                                       result to every rank

    staging, one-shot:  [ from rank 0: slot 0 | slot 1 | .. ] [ from rank 1: .. ] ..       slot = tile
    staging, two-shot:  [ from rank 0: own slots ] [ from rank 1: .. ] .. [ results: all tiles ]

Tiles are dense block_m x block_n blocks in the dtype of the result. Each role waits only for the one before
it, whose ids are lower; producers wait for nobody. Sums are in fp32 and in order of rank, and made once
(two-shot) or from equal data in equal order (one-shot), so all ranks get the same bits. Owners alternate from
tile to tile: at any time all of them are written to.

Cost per rank: 2 M N K flops; sent (n-1) M N elements (one-shot) or 2 (n-1)/n M N (two-shot), equal for 2
ranks, where one-shot saves a trip. Staging: n M N, or 2 M N; twice, for two halves. Exposed are the last
reductions and, in two-shot, the last results.
"""

import triton
import triton.language as tl

from pycomm.fused.kernels.matmul_reduce_scatter import send_tile, sum_when_here
from pycomm.fused.kernels.signal import (
    OF_A_RANK,
    RESULT,
    begin,
    finish,
    flag_of,
    meet,
    post,
    staging_of,
    wait_for,
)
from pycomm.fused.kernels.tile import complete, inside, multiply, narrow, place, store_tile, wide


@triton.jit
def produce(
    a, b, table, staging, first_item, rank, m, n, k, stride_am, stride_ak, stride_bk, stride_bn, slots, epoch,
    WORLD: tl.constexpr, PRODUCERS: tl.constexpr, ONE_SHOT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Partial tiles to where they are added."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    PANELS: tl.constexpr = TILE.panels
    row_tiles, column_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for index in range(first_item, row_tiles * column_tiles * PANELS, PRODUCERS):
        tile, panel = index // PANELS, index % PANELS
        tile_m, tile_n = place(tile, row_tiles, column_tiles, TILE.group_m)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = panel * n + tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        z, _ = multiply(
            a, rows.to(tl.int64) * stride_am, rows < m, tile_m * BLOCK_M, stride_ak,
            b, columns, panel * n + tile_n * BLOCK_N, (panel + 1) * n, k, stride_bk, stride_bn,
            1, TILE.a_mode, TILE,
        )  # fmt: skip
        if ONE_SHOT:
            for step in range(1, WORLD + 1):
                send_tile(z, table, staging, (rank + step) % WORLD, rank, index, slots, epoch, TILE)
        else:
            slot = tile // WORLD * PANELS + panel
            send_tile(z, table, staging, tile % WORLD, rank, slot, slots, epoch, TILE)


@triton.jit
def hand_round(
    bias, group, staging, first_item, m, n, tiles, slots, epoch,
    WORLD: tl.constexpr, REDUCERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Two-shot: completes the tiles that this rank owns and sends the results to every rank; with
    TILE.save the preactivation behind each. group: (table, local, record, limit, rank).
    """
    table, local, record, limit, rank = group
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    size: tl.constexpr = TILE.block_m * TILE.block_n
    parts: tl.constexpr = 1 + (TILE.panels if TILE.save else 0)
    partials = staging_of(table, rank, staging, TILE.wire)
    for index in range(first_item, (tiles - rank + WORLD - 1) // WORLD, REDUCERS):
        tile = rank + index * WORLD
        z, z_up = sum_when_here(group, staging, partials, index, slots, epoch, WORLD, TILE)
        _, tile_n = place(tile, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), TILE.group_m)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        z, z_up, y = complete(z, z_up, bias, columns, n, TILE)
        for step in range(1, WORLD + 1):
            peer = (rank + step) % WORLD
            results = staging_of(table, peer, staging, TILE.wire)
            results = results + (wide(WORLD) * slots + tile * parts) * size
            results = tl.multiple_of(results, 16) + inside(TILE)
            tl.store(results, narrow(y, TILE.wire, TILE.upcast))
            if TILE.save:
                tl.store(results + size, narrow(z, TILE.wire, TILE.upcast))
                if TILE.panels == 2:
                    tl.store(results + 2 * size, narrow(z_up, TILE.wire, TILE.upcast))
            post(flag_of(table, peer, staging, WORLD * slots + tile), epoch)


@triton.jit(do_not_specialize=OF_A_RANK)
def matmul_all_reduce(
    a, b, bias, out, z_out, table, local, record,
    fingerprint, limit, rank, m, n, k, staging_offset, half, stride_am, stride_ak, stride_bk, stride_bn,
    WORLD: tl.constexpr, PRODUCERS: tl.constexpr, REDUCERS: tl.constexpr, FINISHERS: tl.constexpr,
    ONE_SHOT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """a: (m, k), b: (k, panels * n), out: (m, n) dense. With ONE_SHOT, FINISHERS is 0 and the reducers
    finish.
    """
    pid = tl.program_id(0)
    epoch = begin(table, local, fingerprint, rank, WORLD)
    staging = staging_offset + wide(epoch & 1) * half
    row_tiles, column_tiles = tl.cdiv(m, TILE.block_m), tl.cdiv(n, TILE.block_n)
    tiles = row_tiles * column_tiles
    if ONE_SHOT:
        slots = tiles * TILE.panels
    else:
        slots = tl.cdiv(tiles, WORLD) * TILE.panels
    group = (table, local, record, limit, rank)
    if pid < PRODUCERS:
        produce(
            a, b, table, staging, pid, rank, m, n, k, stride_am, stride_ak, stride_bk, stride_bn, slots,
            epoch, WORLD, PRODUCERS, ONE_SHOT, TILE,
        )  # fmt: skip
    elif ONE_SHOT:
        finish_from_partials(
            bias, out, z_out, group, staging, pid - PRODUCERS, m, n, slots, epoch, WORLD, REDUCERS, TILE,
        )  # fmt: skip
    elif pid < PRODUCERS + REDUCERS:
        hand_round(
            bias, group, staging, pid - PRODUCERS, m, n, tiles, slots, epoch, WORLD, REDUCERS, TILE,
        )  # fmt: skip
    else:
        finish_from_results(
            out, z_out, group, staging, pid - PRODUCERS - REDUCERS, m, n, slots, epoch,
            WORLD, FINISHERS, TILE,
        )  # fmt: skip
    if pid == tl.num_programs(0) - 1:
        meet(table, local, record, limit, fingerprint, rank, epoch, WORLD)
    finish(local, epoch)


@triton.jit
def finish_from_partials(
    bias, out, z_out, group, staging, first_item, m, n, slots, epoch,
    WORLD: tl.constexpr, REDUCERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One-shot: tiles of out from the partials of all ranks."""
    table, local, record, limit, rank = group
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    row_tiles, column_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    partials = staging_of(table, rank, staging, TILE.wire)
    for tile in range(first_item, row_tiles * column_tiles, REDUCERS):
        z, z_up = sum_when_here(group, staging, partials, tile, slots, epoch, WORLD, TILE)
        tile_m, tile_n = place(tile, row_tiles, column_tiles, TILE.group_m)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        store_tile(z, z_up, bias, out, z_out, wide(rows), rows < m, columns, n, TILE)


@triton.jit
def finish_from_results(
    out, z_out, group, staging, first_item, m, n, slots, epoch,
    WORLD: tl.constexpr, FINISHERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Two-shot: tiles of out, and of the preactivation, as their owners have made them."""
    table, local, record, limit, rank = group
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    PANELS: tl.constexpr = TILE.panels
    size: tl.constexpr = TILE.block_m * TILE.block_n
    parts: tl.constexpr = 1 + (TILE.panels if TILE.save else 0)
    row_tiles, column_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    results = staging_of(table, rank, staging, TILE.wire) + wide(WORLD) * slots * size + inside(TILE)
    for tile in range(first_item, row_tiles * column_tiles, FINISHERS):
        flag = flag_of(table, rank, staging, WORLD * slots + tile)
        wait_for(flag, epoch, local, record, limit, tile % WORLD, RESULT)
        tile_m, tile_n = place(tile, row_tiles, column_tiles, TILE.group_m)
        rows = wide(tile_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = (rows < m) & (columns < n)
        result = results + wide(tile) * parts * size
        tl.store(out + rows * n + columns, tl.load(result), mask)
        if TILE.save:
            tl.store(z_out + rows * (PANELS * n) + columns, tl.load(result + size), mask)
            if PANELS == 2:
                tl.store(z_out + rows * (PANELS * n) + n + columns, tl.load(result + 2 * size), mask)
