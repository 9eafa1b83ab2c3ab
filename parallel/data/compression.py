"""Compressed sums of a gradient bucket: fewer bytes, an approximate sum, and the error kept for the next
step.

    x = gradients + error of last time  --compress-->  c(x)  --sum over ranks-->  new gradients
                                                       error = x - c(x) stays here

Error feedback (Seide et al. 2014; Karimireddy et al. 2019) makes up for a biased compression: what was left
out is sent later, so the sum over time of what was sent differs from the sum of the gradients by one bounded
error, whatever the number of steps.

    name        bytes sent per rank, P elements, n ranks      error         source
    fp16, bf16  2(n-1)/n * 2 P                                rounding      feedback off by default
    int8        2(n-1)/n * (1 + 4/1024) P                     1/254 of the  a scale per 1024 elements; below
                                                              chunk's max
    powersgd    2(n-1)/n * itemsize * (sum over matrices      all but the   Vogels et al. 2019; itemsize is 4
                (rows + columns) * rank + the rest)           main part     at least, it computes in fp32
    topk        (n-1) * ratio * P * (itemsize + 4)            all but the   Lin et al. 2018; Stich et al. 2018
                                                              largest

int8 cannot be all-reduced as it is: sums of int8 overflow, and each rank has its own scales. So, with two
ranks and chunks A B C:

               quantise    all_to_all, to the owners    sum in order of rank, quantise    all_gather
    rank 0     A0 B0 C0    A0 B0  A1 B1                 A = A0+A1  B = B0+B1              A B C
    rank 1     A1 B1 C1    C0     C1                    C = C0+C1                         A B C

The owner's second rounding has an error of its own, which the owner keeps and adds next time. A row on the
wire is 1024 int8 and the scale, so that each step is one collective. int8 of fewer than 1024 elements still
sends a whole chunk.

PowerSGD: a matrix M (rows, columns) is summed as P Q^T: P = M Q, summed over ranks and made orthonormal, Q =
M^T P, summed; Q starts from the last step's, so the steps together are a power iteration. P is made
orthonormal by Householder QR, which gives orthonormal columns even where P is zero: with Gram-Schmidt a
gradient of zeros once would keep Q at zero for ever. What is not worth it (vectors, small matrices) travels
uncompressed in the collective of P, so a bucket costs two collectives. The error is that of this rank's own
matrix, M - P (M^T P)^T; the errors of all ranks add up to the error of the sum.

All ranks end with the same bits: what is sent is the same on all after the last collective, and what is
computed from it is computed alike. (PowerSGD computes matrix products there: ranks on different kinds of
machine would differ in the last bits.)

Not finite: an inf or nan in a gradient makes an inf or nan in the result on every rank (int8: the whole
chunk, PowerSGD: the whole matrix), so that a loss scaler or a check of the norm sees it. The error kept is
set to 0 there, else one bad step would spoil all later.

Sharing one state between buckets would mix their errors, so each bucket has an instance: see
make_compression.
"""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.plan import CompressionName

__all__ = ["Cast", "Compression", "Int8", "MakeCompression", "PowerSGD", "TopK", "make_compression"]

CHUNK = 1024  # elements per scale of int8: 0.4 % more bytes, and an outlier spoils 1023 others at most


class Compression:
    """Base: the error feedback. A subclass has `_sum`. error_feedback: keep and re-send what compression left
    out (memory: P elements).
    """

    def __init__(self, *, error_feedback: bool = True) -> None:
        self.error_feedback = error_feedback
        self.error: torch.Tensor | None = None  # (P,), of the dtype in which is computed: fp32 at least

    def reduce(self, flat: torch.Tensor, group: comm.Group, views: Sequence[torch.Tensor]) -> None:
        """In place: flat := about the sum of flat over the group, equal bits on all ranks. Collective.

        flat: (P,) contiguous, floating. views: the gradients, as contiguous views into flat; matrices are
        found in them, what they do not cover is summed as well. A group of one has nothing to send and leaves
        flat alone. Raises ValueError when P changes between calls.
        """
        if group.size == 1 or flat.numel() == 0:
            return
        dtype = torch.promote_types(flat.dtype, torch.float32)
        if self.error is not None and self.error.shape != flat.shape:
            raise ValueError(
                f"[rank {group.rank}/{group.size}] compression: this instance keeps the error of a bucket of "
                f"{self.error.numel()}, got {flat.numel()} elements. Make one instance per bucket."
            )
        x = flat.to(dtype) if self.error is None else flat + self.error
        total, sent = self._sum(x, group, flat, views)
        if self.error_feedback:
            self.error = finite(x - sent)
        flat.copy_(total)

    def _sum(
        self, x: torch.Tensor, group: comm.Group, flat: torch.Tensor, views: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x (P,), not to be changed -> (its approximate sum over ranks, what of this rank's x is in it).

        flat, views: as in reduce(); x has the values, flat tells the dtype that travels and where the views
        lie.
        """
        raise NotImplementedError


def finite(error: torch.Tensor) -> torch.Tensor:
    return error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class Cast(Compression):
    """The all-reduce in a narrower dtype (torch.float16, torch.bfloat16). fp16 overflows to inf beyond 65504,
    which stays visible.

    Feedback is for the rounding of this rank's gradient; the all-reduce rounds the sum once more, which
    nothing makes up for.
    """

    def __init__(self, dtype: torch.dtype, *, error_feedback: bool = False) -> None:
        super().__init__(error_feedback=error_feedback)
        self.dtype = dtype

    def _sum(
        self, x: torch.Tensor, group: comm.Group, flat: torch.Tensor, views: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        narrow = x.to(self.dtype)
        sent = narrow.to(x.dtype) if self.error_feedback else x
        comm.all_reduce(narrow, group)
        return narrow, sent


def quantise(chunks: torch.Tensor) -> torch.Tensor:
    """chunks (c, 1024) -> rows (c, 1028) int8: values and the bytes of their fp32 scale. A chunk that is not
    finite becomes nan.
    """
    scale = (chunks.abs().amax(1) / 127).float()
    divisor = torch.where(scale > 0, scale, 1.0).to(chunks.dtype)
    values = (chunks / divisor[:, None]).round_().clamp_(-127, 127).nan_to_num_(nan=0.0).to(torch.int8)
    # 0 * nan is nan: also elements that were rounded to 0 become nan.
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    return torch.cat([values, scale.view(torch.int8).view(-1, 4)], 1)


def dequantise(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = rows[:, CHUNK:].contiguous().view(torch.float32)
    return rows[:, :CHUNK].to(dtype) * scale.to(dtype)


class Int8(Compression):
    """8 bits per element; see the top of the file. Error feedback holds P elements, and P/n for the owner's
    rounding.
    """

    def __init__(self, *, error_feedback: bool = True) -> None:
        super().__init__(error_feedback=error_feedback)
        self.owner_error: torch.Tensor | None = None

    def _sum(
        self, x: torch.Tensor, group: comm.Group, flat: torch.Tensor, views: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = -(-x.numel() // CHUNK)
        chunks = x.new_zeros(count, CHUNK)
        chunks.view(-1)[: x.numel()] = x
        sizes = comm.even_sizes(count, group.size)
        own = sizes[group.rank]
        rows = quantise(chunks)
        sent = dequantise(rows, x.dtype).view(-1)[: x.numel()]
        arrived = comm.all_to_all(rows, sizes, [own] * group.size, group).view(group.size, own, CHUNK + 4)
        total = x.new_zeros(own, CHUNK) if self.owner_error is None else self.owner_error
        for part in arrived:
            total += dequantise(part, x.dtype)
        rows = quantise(total)
        if self.error_feedback:
            self.owner_error = finite(total - dequantise(rows, x.dtype))
        rows = comm.all_gather_dim(rows, 0, sizes, group)
        return dequantise(rows, x.dtype).view(-1)[: x.numel()], sent


class _Matrix(NamedTuple):
    """A gradient to compress."""

    offset: int  # in the bucket
    rows: int
    columns: int
    rank: int  # columns of its P and Q


class PowerSGD(Compression):
    """Low-rank sums of matrices.

    rank: columns of P and Q. A gradient of 2 or more dimensions counts as (shape[0], rest) and is compressed
    where it has more than min_ratio times the elements of its P and Q. seed: of the first Q, equal on all
    ranks.
    """

    def __init__(
        self, *, rank: int = 4, min_ratio: float = 1.0, seed: int = 0, error_feedback: bool = True
    ) -> None:
        super().__init__(error_feedback=error_feedback)
        if rank < 1:
            raise ValueError(f"PowerSGD(rank={rank}): needs rank >= 1")
        self.rank, self.min_ratio, self.seed = rank, min_ratio, seed
        self.qs: list[torch.Tensor] | None = None  # one (columns, rank) per compressed matrix

    def _matrices(
        self, flat: torch.Tensor, views: Sequence[torch.Tensor], group: comm.Group
    ) -> list[_Matrix]:
        """The matrices to compress, by offset."""
        chosen: list[_Matrix] = []
        for view in views:
            if view.dim() < 2 or view.numel() == 0:
                continue
            if (
                view.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
                or not view.is_contiguous()
            ):
                raise ValueError(
                    f"[rank {group.rank}/{group.size}] PowerSGD: a gradient of shape {tuple(view.shape)} is "
                    "no contiguous view into flat; make the views with flat[a:b].view(shape)"
                )
            rows, columns = view.shape[0], view.numel() // view.shape[0]
            rank = min(self.rank, rows, columns)
            if rows * columns > self.min_ratio * rank * (rows + columns):
                offset = int(view.storage_offset() - flat.storage_offset())
                chosen.append(_Matrix(offset, rows, columns, rank))
        return sorted(chosen)

    def _first_qs(self, matrices: Sequence[_Matrix], x: torch.Tensor) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)  # of the CPU: the same numbers on all devices
        return [
            torch.randn(columns, rank, generator=generator, dtype=x.dtype).to(x.device)
            for _, _, columns, rank in matrices
        ]

    def _sum(
        self, x: torch.Tensor, group: comm.Group, flat: torch.Tensor, views: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        matrices = self._matrices(flat, views, group)
        if self.qs is None:
            self.qs = self._first_qs(matrices, x)
        taken = [
            x.narrow(0, offset, rows * columns).view(rows, columns) for offset, rows, columns, _ in matrices
        ]
        rest, at = [], 0
        for offset, rows, columns, _ in matrices:
            rest.append(x[at:offset])
            at = offset + rows * columns
        rest.append(x[at:])

        ps = [matrix @ q for matrix, q in zip(taken, self.qs, strict=True)]
        summed = all_reduce_list(rest + ps, group)
        rest_sums, ps = summed[: len(rest)], [torch.linalg.qr(p)[0].contiguous() for p in summed[len(rest) :]]
        own_qs = [matrix.T @ p for matrix, p in zip(taken, ps, strict=True)]
        qs = all_reduce_list(own_qs, group) if matrices else []

        total, sent, at = torch.empty_like(x), x.clone(), 0
        for (offset, rows, columns, _), rest_sum, p, own_q, q in zip(
            matrices, rest_sums[:-1], ps, own_qs, qs, strict=True
        ):
            total[at:offset] = rest_sum
            at = offset + rows * columns
            total[offset:at] = (p @ q.T).view(-1)
            sent[offset:at] = (p @ own_q.T).view(-1)
        total[at:] = rest_sums[-1]
        self.qs = [finite(q.clone()) for q in qs]
        return total, sent


def all_reduce_list(tensors: Sequence[torch.Tensor], group: comm.Group) -> list[torch.Tensor]:
    """Sums over ranks, in one collective."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    comm.all_reduce(flat, group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    # Copies: the same alignment for a matrix everywhere and always, which the bits of a matrix product may
    # depend on.
    return [part.clone().view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class TopK(Compression):
    """The ratio * P elements of largest magnitude (one at least), with their indices. Rank 0's are added
    first, then rank 1's.
    """

    def __init__(self, *, ratio: float = 0.01, error_feedback: bool = True) -> None:
        super().__init__(error_feedback=error_feedback)
        if not 0 < ratio <= 1:
            raise ValueError(f"TopK(ratio={ratio}): needs 0 < ratio <= 1")
        self.ratio = ratio

    def _sum(
        self, x: torch.Tensor, group: comm.Group, flat: torch.Tensor, views: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x.numel() >= 2**31:
            raise ValueError(
                f"[rank {group.rank}/{group.size}] TopK: {x.numel()} elements in a bucket; indices of 32 "
                "bits end at 2**31"
            )
        count = min(x.numel(), max(1, round(self.ratio * x.numel())))
        indices = x.abs().topk(count, sorted=False).indices  # nan counts as the largest
        values = x[indices].to(flat.dtype)
        message = torch.cat([values.view(torch.uint8), indices.int().view(torch.uint8)])
        arrived = message.new_empty(group.size * message.numel())
        comm.all_gather(arrived, message, group)
        total = torch.zeros_like(x)
        for part in arrived.split(message.numel()):
            head, tail = part.split([values.numel() * values.element_size(), 4 * count])
            # Copies: a view of another dtype needs its alignment. Indices of one rank are distinct, so
            # index_add_ has one order.
            total.index_add_(0, tail.clone().view(torch.int32), head.clone().view(flat.dtype).to(x.dtype))
        return total, torch.zeros_like(x).index_copy_(0, indices, values.to(x.dtype))


MakeCompression: TypeAlias = Callable[[], Compression]  # for one bucket
KINDS: dict[str, Callable[..., Compression]] = {
    "fp16": lambda **options: Cast(torch.float16, **options),
    "bf16": lambda **options: Cast(torch.bfloat16, **options),
    "int8": Int8,
    "powersgd": PowerSGD,
    "topk": TopK,
}


def make_compression(
    kind: CompressionName | Compression | Callable[[], Compression], **options: float
) -> Callable[[], Compression]:
    """A function that makes the Compression of one bucket.

    kind: "fp16", "bf16", "int8", "powersgd", "topk" with the options of the class (error_feedback, rank,
    ratio, ...); or an instance, of which each bucket gets a copy; or such a function already. Raises
    ValueError, here and not at the first step, for what does not fit.
    """
    if isinstance(kind, str):
        if kind not in KINDS:
            raise ValueError(
                f"compression {kind!r} is not known; choose from {', '.join(KINDS)}, or give a Compression"
            )
        try:
            KINDS[kind](**options)
        except TypeError as error:
            raise ValueError(
                f"compression {kind!r} does not take these options: {options} ({error})"
            ) from None
        return lambda: KINDS[kind](**options)
    if options:
        raise ValueError(f"compression: options {options} go with a name; {type(kind).__name__} has its own")
    if isinstance(kind, Compression):
        return lambda: copy.deepcopy(kind)
    if not callable(kind):
        raise ValueError(
            f"compression: {kind!r} is neither a name, a Compression, nor a function that makes one"
        )
    return kind
