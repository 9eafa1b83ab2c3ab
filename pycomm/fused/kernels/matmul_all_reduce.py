"""out = activation((sum over ranks of a @ b) + bias) on every rank, in one of two ways.

    one-shot        programs  0 .. PRODUCERS-1                     .. + REDUCERS
    (2 ranks,                 a partial tile goes to the           for each tile: wait for n tiles, add, bias, activation, out
     small M N)               staging of every rank

    two-shot        programs  0 .. PRODUCERS-1                     .. + REDUCERS                         .. + FINISHERS
                              partial tile t goes to its owner,    for each own tile: wait for n,        for each tile: wait for its
                              rank t % n                           add, bias, activation, send the       result, out
                                                                   result to every rank

    staging, one-shot:  [ from rank 0: slot 0 | slot 1 | .. ] [ from rank 1: .. ] ..       slot = tile
    staging, two-shot:  [ from rank 0: own slots ] [ from rank 1: .. ] .. [ results: all tiles ]

Tiles are dense BLOCK_M x BLOCK_N blocks in the dtype of the result. Each role waits only for the one before it, whose ids are lower;
producers wait for nobody. Sums are in fp32 and in order of rank, and made once (two-shot) or from equal data in equal order (one-shot),
so all ranks get the same bits. Owners alternate from tile to tile: at any time all of them are written to.

Cost per rank: 2 M N K flops; sent (n-1) M N elements (one-shot) or 2 (n-1)/n M N (two-shot), equal for 2 ranks, where one-shot saves a
trip. Staging: n M N, or 2 M N; twice, for two halves. Exposed are the last reductions and, in two-shot, the last results.
"""

import triton
import triton.language as tl

from pycomm.fused.kernels.matmul_reduce_scatter import send_tile, sum_when_here
from pycomm.fused.kernels.signal import OF_A_RANK, RESULT, begin, finish, flag_of, meet, post, staging_of, wait_for
from pycomm.fused.kernels.tile import complete, inside, multiply, narrow, place, store_tile, wide


@triton.jit
def produce(
    a, b, table, staging, first_item, rank, m, n, k, stride_am, stride_ak, stride_bk, stride_bn, slots, epoch,
    WORLD: tl.constexpr, PRODUCERS: tl.constexpr, WIRE: tl.constexpr, ONE_SHOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PANELS: tl.constexpr,
    A_MODE: tl.constexpr, B_MODE: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial tiles to where they are added."""
    row_tiles, column_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for index in range(first_item, row_tiles * column_tiles * PANELS, PRODUCERS):
        tile, panel = index // PANELS, index % PANELS
        tile_m, tile_n = place(tile, row_tiles, column_tiles, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = panel * n + tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        z, _ = multiply(
            a, rows.to(tl.int64) * stride_am, rows < m, tile_m * BLOCK_M, stride_ak,
            b, columns, panel * n + tile_n * BLOCK_N, (panel + 1) * n, k, stride_bk, stride_bn,
            BLOCK_M, BLOCK_N, BLOCK_K, 1, A_MODE, B_MODE, EVEN_K, UPCAST, PRECISION,
        )  # fmt: skip
        if ONE_SHOT:
            for step in range(1, WORLD + 1):
                send_tile(z, table, staging, (rank + step) % WORLD, rank, index, slots, epoch, WIRE, BLOCK_M, BLOCK_N, UPCAST)
        else:
            send_tile(z, table, staging, tile % WORLD, rank, tile // WORLD * PANELS + panel, slots, epoch, WIRE, BLOCK_M, BLOCK_N, UPCAST)


@triton.jit
def hand_round(
    bias, table, local, record, limit, staging, first_item, rank, m, n, tiles, slots, epoch,
    WORLD: tl.constexpr, REDUCERS: tl.constexpr, WIRE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr, PANELS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Two-shot: completes the tiles that this rank owns and sends the results to every rank; with SAVE the preactivation behind each."""
    size: tl.constexpr = BLOCK_M * BLOCK_N
    parts: tl.constexpr = 1 + (PANELS if SAVE else 0)
    partials = staging_of(table, rank, staging, WIRE)
    for index in range(first_item, (tiles - rank + WORLD - 1) // WORLD, REDUCERS):
        tile = rank + index * WORLD
        z, z_up = sum_when_here(table, local, record, limit, staging, partials, rank, index, slots, epoch, WORLD, BLOCK_M, BLOCK_N, PANELS)
        _, tile_n = place(tile, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        z, z_up, y = complete(z, z_up, bias, columns, n, HAS_BIAS, PANELS, ACTIVATION)
        for step in range(1, WORLD + 1):
            peer = (rank + step) % WORLD
            results = staging_of(table, peer, staging, WIRE) + (wide(WORLD) * slots + tile * parts) * size
            results = tl.multiple_of(results, 16) + inside(BLOCK_M, BLOCK_N)
            tl.store(results, narrow(y, WIRE, UPCAST))
            if SAVE:
                tl.store(results + size, narrow(z, WIRE, UPCAST))
                if PANELS == 2:
                    tl.store(results + 2 * size, narrow(z_up, WIRE, UPCAST))
            post(flag_of(table, peer, staging, WORLD * slots + tile), epoch)


@triton.jit(do_not_specialize=OF_A_RANK)
def matmul_all_reduce(
    a, b, bias, out, z_out, table, local, record,
    fingerprint, limit, rank, m, n, k, staging_offset, half, stride_am, stride_ak, stride_bk, stride_bn,
    WORLD: tl.constexpr, PRODUCERS: tl.constexpr, REDUCERS: tl.constexpr, FINISHERS: tl.constexpr, WIRE: tl.constexpr,
    ONE_SHOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PANELS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE: tl.constexpr,
    A_MODE: tl.constexpr, B_MODE: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a: (m, k), b: (k, PANELS * n), out: (m, n) dense. With ONE_SHOT, FINISHERS is 0 and the reducers finish."""
    pid = tl.program_id(0)
    epoch = begin(table, local, fingerprint, rank, WORLD)
    staging = staging_offset + wide(epoch & 1) * half
    row_tiles, column_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = row_tiles * column_tiles
    if ONE_SHOT:
        slots = tiles * PANELS
    else:
        slots = tl.cdiv(tiles, WORLD) * PANELS
    if pid < PRODUCERS:
        produce(
            a, b, table, staging, pid, rank, m, n, k, stride_am, stride_ak, stride_bk, stride_bn, slots, epoch,
            WORLD, PRODUCERS, WIRE, ONE_SHOT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PANELS, A_MODE, B_MODE, EVEN_K, UPCAST, PRECISION,
        )  # fmt: skip
    elif ONE_SHOT:
        finish_from_partials(
            bias, out, z_out, table, local, record, limit, staging, pid - PRODUCERS, rank, m, n, slots, epoch,
            WORLD, REDUCERS, WIRE, BLOCK_M, BLOCK_N, GROUP_M, PANELS, ACTIVATION, HAS_BIAS, SAVE, UPCAST,
        )  # fmt: skip
    elif pid < PRODUCERS + REDUCERS:
        hand_round(
            bias, table, local, record, limit, staging, pid - PRODUCERS, rank, m, n, tiles, slots, epoch,
            WORLD, REDUCERS, WIRE, BLOCK_M, BLOCK_N, GROUP_M, PANELS, ACTIVATION, HAS_BIAS, SAVE, UPCAST,
        )  # fmt: skip
    else:
        finish_from_results(
            out, z_out, table, local, record, limit, staging, pid - PRODUCERS - REDUCERS, rank, m, n, slots, epoch,
            WORLD, FINISHERS, WIRE, BLOCK_M, BLOCK_N, GROUP_M, PANELS, SAVE,
        )  # fmt: skip
    if pid == tl.num_programs(0) - 1:
        meet(table, local, record, limit, fingerprint, rank, epoch, WORLD)
    finish(local, epoch)


@triton.jit
def finish_from_partials(
    bias, out, z_out, table, local, record, limit, staging, first_item, rank, m, n, slots, epoch,
    WORLD: tl.constexpr, REDUCERS: tl.constexpr, WIRE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr, PANELS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One-shot: tiles of out from the partials of all ranks."""
    row_tiles, column_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    partials = staging_of(table, rank, staging, WIRE)
    for tile in range(first_item, row_tiles * column_tiles, REDUCERS):
        z, z_up = sum_when_here(table, local, record, limit, staging, partials, rank, tile, slots, epoch, WORLD, BLOCK_M, BLOCK_N, PANELS)
        tile_m, tile_n = place(tile, row_tiles, column_tiles, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        store_tile(z, z_up, bias, out, z_out, wide(rows), rows < m, columns, n, HAS_BIAS, PANELS, ACTIVATION, SAVE, UPCAST)


@triton.jit
def finish_from_results(
    out, z_out, table, local, record, limit, staging, first_item, rank, m, n, slots, epoch,
    WORLD: tl.constexpr, FINISHERS: tl.constexpr, WIRE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr, PANELS: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Two-shot: tiles of out, and of the preactivation, as their owners have made them."""
    size: tl.constexpr = BLOCK_M * BLOCK_N
    parts: tl.constexpr = 1 + (PANELS if SAVE else 0)
    row_tiles, column_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    results = staging_of(table, rank, staging, WIRE) + wide(WORLD) * slots * size + inside(BLOCK_M, BLOCK_N)
    for tile in range(first_item, row_tiles * column_tiles, FINISHERS):
        wait_for(flag_of(table, rank, staging, WORLD * slots + tile), epoch, local, record, limit, tile % WORLD, RESULT)
        tile_m, tile_n = place(tile, row_tiles, column_tiles, GROUP_M)
        rows = wide(tile_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = (rows < m) & (columns < n)
        result = results + wide(tile) * parts * size
        tl.store(out + rows * n + columns, tl.load(result), mask)
        if SAVE:
            tl.store(z_out + rows * (PANELS * n) + columns, tl.load(result + size), mask)
            if PANELS == 2:
                tl.store(z_out + rows * (PANELS * n) + n + columns, tl.load(result + 2 * size), mask)
