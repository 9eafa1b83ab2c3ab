"""What there is to know of a model before it runs: parameters, products, activations, module by module.

A model is embeddings, equal blocks, and what follows them. A block is a list of modules; each says what a
token costs in it, and which share of that tensor parallelism divides:

    x -- norm -- qkv -- attention -- proj -- + -- norm -- up -- act -- down -- + -->
         whole   cut n  cut heads   cut k  whole whole   cut n  cut    cut k   whole

    cut    divided by tp            whole    equal on ranks of tp; divided along the sequence by megatron_sp

Bytes kept for backward are those of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) for 16-bit
activations; per token of a GPT block of width h with a heads and s positions:

    whole 10 h     two norms' inputs 4, qkv input 2, mlp input 2, two dropout masks 2
    cut   24 h     q and k 4, v 2, proj input 2, GELU input 8, its output 8
    scores 5 a s   softmax 2, dropout mask 1, dropout output 2; none where attention is fused (it keeps 4 a)

FLOPs count a multiplication and an addition as two; a causal mask saves none, as in the papers.
"""

import functools
from typing import Literal, NamedTuple, TypeAlias

from pycomm.parallel.planning.quantities import Flops, MeanElements

__all__ = ["CutDim", "Experts", "Kept", "Model", "Module", "Product", "gpt", "llama"]

HALF = 2  # bytes of an activation
CutDim: TypeAlias = Literal["n", "k"]


class Product(NamedTuple):
    """x[tokens, k] @ w[k, n]. cut: which dim tp divides, or None. times: as many of them per token,
    below 1 for what only some tokens reach. experts: these rows are spread evenly over the experts, each with
    a w of its own.
    """

    k: int
    n: int
    cut: CutDim | None = None
    times: float = 1.0
    experts: bool = False


class Module(NamedTuple):
    """Per token, in a forward. moved: bytes read and written by what is no product; kept: bytes for backward.
    Both as (whole, cut). parameters: (whole, cut), without those in experts. experts: it is the mixture.
    """

    name: str
    parameters: tuple[int, int] = (0, 0)
    products: tuple[Product, ...] = ()
    moved: tuple[float, float] = (0.0, 0.0)
    kept: tuple[float, float] = (0.0, 0.0)
    experts: bool = False


class Experts(NamedTuple):
    """A mixture in the place of the MLP: count experts, top_k of them per token, each with `parameters`.
    stacked: all in a few parameters, run by one call; else a loop over modules. tp cuts stacked ones that ep
    does not deal, no others (building/cut.py).
    """

    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    top_k: int
    parameters: int
    stacked: bool = True

    def held(self, ep: int) -> int:
        """Experts of the rank with the most."""
        return -(-self.count // ep)


class BlockParameters(NamedTuple):
    """Of one block; cut: by tp, whole: not."""

    whole: int
    cut: int
    experts: int


class BlockFlops(NamedTuple):
    """Of a forward of one block, per token: products with weights, and those in attention."""

    weights: float
    attention: float


class Kept(NamedTuple):
    """Bytes that one token of a block keeps for backward. tp divides cut and scores."""

    whole: float
    cut: float
    scores: float


class ModuleCost(NamedTuple):
    """flops: of a forward, per token; kept: bytes for backward, per token."""

    name: str
    parameters: int
    flops: float
    kept: float


class Model(NamedTuple):
    """hidden: width between blocks; heads, kv_heads, head_dim: of attention; block: the modules of one block.
    embedding: parameters of the tables before the blocks; head: of the product after them (0 where tied).
    fused: attention keeps no scores. experts: None in a dense model. item: bytes of a parameter in compute.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    sequence: int
    block: tuple[Module, ...]
    embedding: int
    head: int
    last: int = 0  # of the norm after the blocks
    fused: bool = True
    experts: Experts | None = None
    item: int = 2

    @property
    def tied(self) -> bool:
        return self.head == 0

    def block_parameters(self) -> BlockParameters:
        whole = sum(module.parameters[0] for module in self.block)
        cut = sum(module.parameters[1] for module in self.block)
        return BlockParameters(
            whole, cut, self.experts.count * self.experts.parameters if self.experts else 0
        )

    def dealt(self, ep: int) -> "Model":
        """The same as tp sees it: what of the experts tp does not cut is whole."""
        return self if self.experts is None or self.cuts_experts(ep) else _whole_experts(self)

    def cuts_experts(self, ep: int) -> bool:
        """Whether tp divides the experts."""
        return self.experts is not None and self.experts.stacked and ep == 1

    def expert_parameters(self, tp: int, ep: int) -> MeanElements:
        """Of one block, on the rank with the most."""
        if self.experts is None:
            return MeanElements(0)
        if self.cuts_experts(ep):
            return MeanElements(self.experts.count * self.experts.parameters / tp)
        return MeanElements(self.experts.held(ep) * self.experts.parameters)

    @property
    def parameters(self) -> int:
        return self.layers * sum(self.block_parameters()) + self.embedding + self.head + self.last

    @property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        if self.experts is None:
            return self.parameters
        return (
            self.parameters
            - self.layers * (self.experts.count - self.experts.top_k) * self.experts.parameters
        )

    def block_flops(self) -> BlockFlops:
        weights = sum(2 * p.k * p.n * p.times for module in self.block for p in module.products)
        return BlockFlops(weights, 4 * self.sequence * self.heads * self.head_dim)

    def flops(self, tokens: int) -> Flops:
        """Of forward and backward, without recomputation."""
        per_token = self.layers * sum(self.block_flops()) + 2 * self.hidden * self.vocab
        return Flops(3 * per_token * tokens)

    def kept(self) -> Kept:
        whole, cut = (sum(module.kept[i] for module in self.block) for i in (0, 1))
        return Kept(whole, cut, 0 if self.fused else 5 * self.heads * self.sequence)

    def modules(self) -> list[ModuleCost]:
        """Each module, in order."""
        rows = [ModuleCost("embedding", self.embedding, 0, 0)]
        attention, scores = self.block_flops().attention, self.kept().scores
        for module in self.block:
            inside = module.name == "attention"
            experts = self.block_parameters().experts if module.experts else 0
            products = sum(2 * p.k * p.n * p.times for p in module.products) + attention * inside
            kept = sum(module.kept) + scores * inside
            parameters = sum(module.parameters) + experts
            rows.append(ModuleCost(f"block.{module.name}", parameters, products, kept))
        rows.append(ModuleCost("norm", self.last, 0, HALF * self.hidden))
        logits = HALF * self.hidden + 4 * self.vocab
        rows.append(ModuleCost("head", self.head, 2 * self.hidden * self.vocab, logits))
        return rows


@functools.lru_cache(maxsize=1024)
def _whole_experts(model: Model) -> Model:
    block = []
    for module in model.block:
        if module.experts:
            products = tuple(product._replace(cut=None) for product in module.products)
            moved, kept = ((sum(pair), 0) for pair in (module.moved, module.kept))
            module = module._replace(products=products, moved=moved, kept=kept)
        block.append(module)
    return model._replace(block=tuple(block))


def _norm(name: str, h: int, parameters: int) -> Module:
    return Module(name, (parameters, 0), moved=(2 * HALF * h, 0), kept=(HALF * h, 0))


def gpt(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    *,
    vocab: int = 51200,
    sequence: int = 2048,
    fused: bool = True,
    tied: bool = True,
    ffn: int | None = None,
) -> Model:
    """GPT of Megatron-LM: learned positions, LayerNorm, GELU, biases, dropout."""
    h, f = hidden, ffn or 4 * hidden
    add = HALF * 3 * h + h  # x + dropout(y): two reads, a write, a mask
    block = (
        _norm("norm_1", h, 2 * h),
        Module("qkv", (0, 3 * h * h + 3 * h), (Product(h, 3 * h, "n"),), kept=(HALF * h, HALF * 3 * h)),
        Module("attention"),
        Module("proj", (h, h * h), (Product(h, h, "k"),), (add, 0), (h, HALF * h)),
        _norm("norm_2", h, 2 * h),
        Module("up", (0, h * f + f), (Product(h, f, "n"),), (0, HALF * 2 * f), (HALF * h, HALF * f)),
        Module("down", (h, f * h), (Product(f, h, "k"),), (add, 0), (h, HALF * f)),
    )
    embedding = (vocab + sequence) * h
    head = 0 if tied else vocab * h
    return Model(
        name, layers, h, heads, heads, h // heads, vocab, sequence, block, embedding, head, 2 * h, fused
    )


def _experts(hidden: int, ffn: int, top_k: int) -> Module:
    """Module of experts with gates: rows on their way there and back, whole; what is inside, cut."""
    products = Product(hidden, 2 * ffn, "n", top_k, True), Product(ffn, hidden, "k", top_k, True)
    moved = HALF * 2 * 2 * top_k * hidden, HALF * 3 * top_k * ffn
    kept = HALF * 2 * top_k * hidden, HALF * 4 * top_k * ffn
    return Module("experts", (0, 0), products, moved, kept, True)


def llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    *,
    vocab: int,
    sequence: int,
    head_dim: int | None = None,
    tied: bool = False,
    experts: tuple[int, int] | None = None,
    dense: int | None = None,
    extra: tuple[int, int] = (0, 0),
) -> Model:
    """Rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases, no dropout.

    experts: (count, top_k) of experts of width `ffn` each; dense: width of an expert that all tokens meet.
    extra: parameters of a block beside those, (whole, cut by tp): norms of heads, biases of queries and keys.
    """
    h, d = hidden, head_dim or hidden // heads
    q, kv = heads * d, kv_heads * d
    add = HALF * 3 * h
    top_k = experts[1] if experts else 1
    mixture = Experts(experts[0], top_k, 3 * h * ffn) if experts else None
    shared = dense or 0
    weights = 3 * h * shared if experts else 3 * h * ffn
    router = h * experts[0] if experts else 0
    wide = shared if experts else ffn
    products: tuple[Product, ...] = (Product(h, 2 * wide, "n"), Product(wide, h, "k")) if wide else ()
    if experts:
        products += (Product(h, experts[0]),)
    block = (
        _norm("norm_1", h, h),
        Module(
            "qkv",
            (extra[0], extra[1] + h * (q + 2 * kv)),
            (Product(h, q + 2 * kv, "n"),),
            (0, HALF * 2 * (q + kv)),  # rotary
            (HALF * h, HALF * (q + 2 * kv)),
        ),
        Module("attention"),
        Module("proj", (0, q * h), (Product(q, h, "k"),), (add, 0), (0, HALF * q)),
        _norm("norm_2", h, h),
        Module(
            "mlp",
            (router, weights),
            products,
            (add, HALF * 3 * wide),
            (HALF * h, HALF * 4 * wide),
        ),
        *((_experts(h, ffn, experts[1]),) if experts else ()),
    )
    embedding, head = vocab * h, 0 if tied else vocab * h
    return Model(
        name, layers, h, heads, kv_heads, d, vocab, sequence, block, embedding, head, h, True, mixture
    )
