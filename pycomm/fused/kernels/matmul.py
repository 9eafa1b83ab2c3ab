"""out = activation(a @ b + bias) by few programs that go through all tiles.

    tiles of out, group_m = 2     0 2 4     program p takes tiles p, p + programs, ...
                                  1 3 5     with FLATTEN the loops over tiles and over K are one, so that
                                  6 7 8     the loads of the next tile run under the epilogue of this one

Cost: 2 M N K flops, each operand read once per tile row or column, from L2 mostly. Bias and activation work
on the fp32 accumulator; the preactivation is written only when a gradient needs it. Source of the persistent
loop: the Triton documentation, "Persistent Matmul".
"""

import triton
import triton.language as tl

from pycomm.fused.kernels.tile import DESCRIPTOR, complete, multiply, narrow, place, store_tile


@triton.jit
def matmul(
    a, b, bias, out, z_out, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    TILE: tl.constexpr, OUT_MODE: tl.constexpr, FLATTEN: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """a: (m, k), b: (k, panels * n), out: (m, n) dense or a descriptor of it, z_out: (m, panels * n)."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    row_tiles, column_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for index in tl.range(
        tl.program_id(0),
        row_tiles * column_tiles,
        tl.num_programs(0),
        flatten=FLATTEN,
        warp_specialize=WARP_SPECIALIZE,
    ):
        tile_m, tile_n = place(index, row_tiles, column_tiles, TILE.group_m)
        rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        z, z_up = multiply(
            a, rows * stride_am, rows < m, tile_m * BLOCK_M, stride_ak,
            b, columns, tile_n * BLOCK_N, n, k, stride_bk, stride_bn, TILE.panels, TILE.a_mode, TILE,
        )  # fmt: skip
        if OUT_MODE == DESCRIPTOR:
            _, _, y = complete(z, z_up, bias, columns, n, TILE)
            out.store([tile_m * BLOCK_M, tile_n * BLOCK_N], narrow(y, out.dtype, TILE.upcast))
        else:
            store_tile(z, z_up, bias, out, z_out, rows, rows < m, columns, n, TILE)
