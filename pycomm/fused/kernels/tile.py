"""What happens to one tile of a product: which tile comes next, the product itself, bias and activation, the reduction over ranks.

A product (M, K) x (K, N) is computed in tiles of BLOCK_M x BLOCK_N by few programs, each of which goes through many tiles. Operands come
in one of three modes, chosen by the host:

    POINTERS      any strides; ragged edges by masks
    DESCRIPTOR    by the tensor memory accelerator (TMA): the last dimension is dense and rows start at multiples of 16 bytes
    TRANSPOSED    the same of the transposed tensor, e.g. the weight (N, K) of a linear layer
"""

import triton
import triton.language as tl

POINTERS, DESCRIPTOR, TRANSPOSED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def wide(x):
    """As int64; also of an argument that is 1, which Triton makes a constant without methods."""
    return x + tl.zeros((), tl.int64)


@triton.jit
def place(index, row_tiles, column_tiles, GROUP_M: tl.constexpr):
    """Row and column of the index-th tile: GROUP_M rows at a time, column by column, so that neighbours in time share operands in L2."""
    per_group = GROUP_M * column_tiles
    first = index // per_group * GROUP_M
    rows = min(row_tiles - first, GROUP_M)
    return first + index % per_group % rows, index % per_group // rows


@triton.jit
def spread(index, period, full, first):
    """Row of the whole tensor that is row `index` of a piece: the piece has `period` of every `full` rows, from `first` on."""
    period = max(period, 1)
    return (index // period).to(tl.int64) * full + first + index % period


@triton.jit
def multiply(
    a, rows, row_mask, first_row, stride_ak, b, columns, first_column, n, k, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PANELS: tl.constexpr,
    A_MODE: tl.constexpr, B_MODE: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of a @ b in fp32, and with PANELS = 2 the tile n columns to its right (else zeros that nobody uses).

    rows: int64 offsets of the tile's rows in a (POINTERS); first_row: of the tile (DESCRIPTOR, TRANSPOSED); columns: of the tile.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ks = tl.arange(0, BLOCK_K)
    column_mask = columns < n
    if A_MODE == POINTERS:
        a_tile = a + rows[:, None] + ks[None, :] * wide(stride_ak)
    if B_MODE == POINTERS:
        b_tile = b + ks[:, None] * wide(stride_bk) + columns[None, :] * wide(stride_bn)
    for step in range(0, tl.cdiv(k, BLOCK_K)):
        k_mask = ks < k - step * BLOCK_K
        if A_MODE == POINTERS:
            if EVEN_K:
                x = tl.load(a_tile, row_mask[:, None], 0.0)
            else:
                x = tl.load(a_tile, row_mask[:, None] & k_mask[None, :], 0.0)
            a_tile += BLOCK_K * wide(stride_ak)
        elif A_MODE == DESCRIPTOR:
            x = a.load([first_row, step * BLOCK_K])
        else:
            x = tl.trans(a.load([step * BLOCK_K, first_row]))
        if B_MODE == POINTERS:
            if EVEN_K:
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
        if UPCAST:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
        if PANELS == 2:
            if UPCAST:
                y_up = y_up.to(tl.float32)
            acc_up = tl.dot(x, y_up, acc_up, input_precision=PRECISION)
    return acc, acc_up


@triton.jit
def narrow(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """fp32 as DTYPE, rounded to nearest even. The interpreter (UPCAST) cuts bf16 off instead, so there the bits are rounded first."""
    if UPCAST and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """In fp32. relu keeps NaN; tanh is written by the logistic function, which Triton has: tanh(x) = 2 sigmoid(2x) - 1."""
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
def complete(
    z, z_up, bias, columns, n, HAS_BIAS: tl.constexpr, PANELS: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """(z + bias, z_up + bias, result) of a tile, in fp32."""
    if HAS_BIAS:
        z += tl.load(bias + columns, columns < n, 0.0).to(tl.float32)[None, :]
        if PANELS == 2:
            z_up += tl.load(bias + n + columns, columns < n, 0.0).to(tl.float32)[None, :]
    if PANELS == 2:
        y = activate(z, "silu") * z_up
    else:
        y = activate(z, ACTIVATION)
    return z, z_up, y


@triton.jit
def store_tile(
    z, z_up, bias, out, z_out, rows, row_mask, columns, n,
    HAS_BIAS: tl.constexpr, PANELS: tl.constexpr, ACTIVATION: tl.constexpr, SAVE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Bias, activation and the result's place in out (dense rows of n); with SAVE also the preactivation in z_out (PANELS * n).

    rows: int64 indices of rows in out.
    """
    z, z_up, y = complete(z, z_up, bias, columns, n, HAS_BIAS, PANELS, ACTIVATION)
    mask = row_mask[:, None] & (columns < n)[None, :]
    if SAVE:
        place_of_z = z_out + rows[:, None] * (PANELS * n) + columns[None, :]
        tl.store(place_of_z, narrow(z, z_out.dtype.element_ty, UPCAST), mask)
        if PANELS == 2:
            tl.store(place_of_z + n, narrow(z_up, z_out.dtype.element_ty, UPCAST), mask)
    tl.store(out + rows[:, None] * n + columns[None, :], narrow(y, out.dtype.element_ty, UPCAST), mask)


@triton.jit
def inside(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets of a tile that is stored by itself, densely, all of it: nothing to mask, and 16 bytes in one access."""
    return tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def sum_of_partials(partials, slot, slots, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sum over ranks of their tiles for this slot, in fp32 and in order of rank. partials: [rank][slot] tiles."""
    tile = partials + wide(slot) * (BLOCK_M * BLOCK_N) + inside(BLOCK_M, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for source in range(WORLD):
        total += tl.load(tile + source * wide(slots) * (BLOCK_M * BLOCK_N)).to(tl.float32)
    return total
