"""What happens to one tile of a product: which tile comes next, the product itself, bias and activation, the
reduction over ranks.

A product (M, K) x (K, N) is computed in tiles of BLOCK_M x BLOCK_N by few programs, each of which goes
through many tiles. Operands come in one of three modes, chosen by the host:

    POINTERS      any strides; ragged edges by masks
    DESCRIPTOR    by the tensor memory accelerator (TMA): the last dimension is dense and rows start at
                  multiples of 16 bytes
    TRANSPOSED    the same of the transposed tensor, e.g. the weight (N, K) of a linear layer

[Note: arguments] All that is fixed when a kernel is compiled is in one Tile, a constexpr. A shape of
tl.zeros, and a word passed to a function, are made constexprs of their own: Triton 3.6 takes no field of a
tuple there. The values of a launch stay single arguments of a kernel, since it is for each argument that
Triton decides whether its value may become a constant (OF_A_RANK in signal.py). Inside a kernel those that go
together are tuples.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """What a kernel is compiled for. See [Note: arguments]."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int  # rows of tiles that are visited together
    panels: int  # 2 for swiglu: the gate and, n columns to its right, the up projection
    activation: str
    has_bias: bool
    save: bool  # the preactivation is stored too
    even_k: bool  # K is a multiple of block_k
    upcast: bool  # in the interpreter: operands are widened before a product
    precision: str
    a_mode: int
    b_mode: int
    wire: tl.dtype | None = None  # of partial tiles that travel; None where there are none


POINTERS, DESCRIPTOR, TRANSPOSED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def wide(x):
    """As int64; also of an argument that is 1, which Triton makes a constant without methods."""
    return x + tl.zeros((), tl.int64)


@triton.jit
def place(index, row_tiles, column_tiles, GROUP_M: tl.constexpr):
    """Row and column of the index-th tile: GROUP_M rows at a time, column by column, so that neighbours in
    time share operands in L2.
    """
    per_group = GROUP_M * column_tiles
    first = index // per_group * GROUP_M
    rows = min(row_tiles - first, GROUP_M)
    return first + index % per_group % rows, index % per_group // rows


@triton.jit
def spread(index, period, full, first):
    """Row of the whole tensor that is row `index` of a piece: the piece has `period` of every `full` rows,
    from `first` on.
    """
    period = max(period, 1)
    return (index // period).to(tl.int64) * full + first + index % period


@triton.jit
def multiply(
    a, rows, row_mask, first_row, stride_ak, b, columns, first_column, n, k, stride_bk, stride_bn,
    PANELS: tl.constexpr, A_MODE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of a @ b in fp32, and with PANELS = 2 the tile n columns to its right (else zeros that nobody
    uses).

    rows: int64 offsets of the tile's rows in a (POINTERS); first_row: of the tile (DESCRIPTOR, TRANSPOSED);
    columns: of the tile.
    """
    shape: tl.constexpr = (TILE.block_m, TILE.block_n)
    BLOCK_K: tl.constexpr = TILE.block_k
    B_MODE: tl.constexpr = TILE.b_mode
    acc = tl.zeros(shape, tl.float32)
    acc_up = tl.zeros(shape, tl.float32)
    ks = tl.arange(0, BLOCK_K)
    column_mask = columns < n
    if A_MODE == POINTERS:
        a_tile = a + rows[:, None] + ks[None, :] * wide(stride_ak)
    if B_MODE == POINTERS:
        b_tile = b + ks[:, None] * wide(stride_bk) + columns[None, :] * wide(stride_bn)
    for step in range(0, tl.cdiv(k, BLOCK_K)):
        k_mask = ks < k - step * BLOCK_K
        if A_MODE == POINTERS:
            if TILE.even_k:
                x = tl.load(a_tile, row_mask[:, None], 0.0)
            else:
                x = tl.load(a_tile, row_mask[:, None] & k_mask[None, :], 0.0)
            a_tile += BLOCK_K * wide(stride_ak)
        elif A_MODE == DESCRIPTOR:
            x = a.load([first_row, step * BLOCK_K])
        else:
            x = tl.trans(a.load([step * BLOCK_K, first_row]))
        if B_MODE == POINTERS:
            if TILE.even_k:
                mask = column_mask[None, :]
            else:
                mask = column_mask[None, :] & k_mask[:, None]
            y = tl.load(b_tile, mask, 0.0)
            if PANELS == 2:
                y_up = tl.load(b_tile + wide(n) * stride_bn, mask, 0.0)
            b_tile += BLOCK_K * wide(stride_bk)
        elif B_MODE == DESCRIPTOR:
            y = b.load([step * BLOCK_K, first_column])
            if PANELS == 2:
                y_up = b.load([step * BLOCK_K, n + first_column])
        else:
            y = tl.trans(b.load([first_column, step * BLOCK_K]))
            if PANELS == 2:
                y_up = tl.trans(b.load([n + first_column, step * BLOCK_K]))
        if TILE.upcast:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        acc = tl.dot(x, y, acc, input_precision=TILE.precision)
        if PANELS == 2:
            if TILE.upcast:
                y_up = y_up.to(tl.float32)
            acc_up = tl.dot(x, y_up, acc_up, input_precision=TILE.precision)
    return acc, acc_up


@triton.jit
def narrow(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """fp32 as DTYPE, rounded to nearest even. The interpreter (UPCAST) cuts bf16 off instead, so there the
    bits are rounded first.
    """
    if UPCAST and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """In fp32. relu keeps NaN; tanh is written by the logistic function, which Triton has: tanh(x) = 2
    sigmoid(2x) - 1.
    """
    if ACTIVATION == "relu":
        return tl.where(z < 0, 0.0, z)
    elif ACTIVATION == "silu":
        return z * tl.sigmoid(z)
    elif ACTIVATION == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    else:
        return z


@triton.jit
def complete(z, z_up, bias, columns, n, TILE: tl.constexpr):
    """(z + bias, z_up + bias, result) of a tile, in fp32."""
    if TILE.has_bias:
        z += tl.load(bias + columns, columns < n, 0.0).to(tl.float32)[None, :]
        if TILE.panels == 2:
            z_up += tl.load(bias + n + columns, columns < n, 0.0).to(tl.float32)[None, :]
    if TILE.panels == 2:
        y = activate(z, "silu") * z_up
    else:
        ACTIVATION: tl.constexpr = TILE.activation
        y = activate(z, ACTIVATION)
    return z, z_up, y


@triton.jit
def store_tile(z, z_up, bias, out, z_out, rows, row_mask, columns, n, TILE: tl.constexpr):
    """Bias, activation and the result's place in out (dense rows of n); with TILE.save also the preactivation
    in z_out (panels * n).

    rows: int64 indices of rows in out.
    """
    z, z_up, y = complete(z, z_up, bias, columns, n, TILE)
    mask = row_mask[:, None] & (columns < n)[None, :]
    if TILE.save:
        place_of_z = z_out + rows[:, None] * (TILE.panels * n) + columns[None, :]
        tl.store(place_of_z, narrow(z, z_out.dtype.element_ty, TILE.upcast), mask)
        if TILE.panels == 2:
            tl.store(place_of_z + n, narrow(z_up, z_out.dtype.element_ty, TILE.upcast), mask)
    tl.store(out + rows[:, None] * n + columns[None, :], narrow(y, out.dtype.element_ty, TILE.upcast), mask)


@triton.jit
def inside(TILE: tl.constexpr):
    """Offsets of a tile that is stored by itself, densely, all of it: nothing to mask, and 16 bytes in one
    access.
    """
    return tl.arange(0, TILE.block_m)[:, None] * TILE.block_n + tl.arange(0, TILE.block_n)[None, :]


@triton.jit
def sum_of_partials(partials, slot, slots, WORLD: tl.constexpr, TILE: tl.constexpr):
    """The sum over ranks of their tiles for this slot, in fp32 and in order of rank. partials: [rank][slot]
    tiles.
    """
    shape: tl.constexpr = (TILE.block_m, TILE.block_n)
    size: tl.constexpr = TILE.block_m * TILE.block_n
    tile = partials + wide(slot) * size + inside(TILE)
    total = tl.zeros(shape, tl.float32)
    for source in range(WORLD):
        total += tl.load(tile + source * wide(slots) * size).to(tl.float32)
    return total
