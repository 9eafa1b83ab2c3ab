"""Published tables that predictions are compared with, by tests and by docs/planning.md. Only what the
papers print.
"""

from typing import NamedTuple

from pycomm.parallel import Plan
from pycomm.parallel.planning import load_machine, named
from pycomm.parallel.planning.job import MEGATRON_2021, MEGATRON_2022, Job

# Rajbhandari et al. 2020 (ZeRO), table 1: GB per device, parameters in 1e9 -> {ranks: stages 1, 2, 3}
ZERO = {
    7.5: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1000: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}


class Korthikanti(NamedTuple):
    """Tables 3 and 5, figures 1 and 7 of Korthikanti et al. 2022. full, selective: seconds of a step with
    full recomputation, and with sequence parallelism and selective recomputation; mfu of the latter.
    figure_1: GiB of parameters and optimizer, of activations without anything, and with both. figure_7:
    percent of the activations of tp alone: sequence parallelism, selective recomputation, both, full
    recomputation.
    """

    model: str
    pp: int
    chunks: int
    rows: int
    microbatch: int
    full: float
    selective: float
    mfu: float
    figure_1: tuple
    figure_7: tuple

    def job(self, recompute):
        chunks = self.chunks if self.chunks > 1 else None
        plan = Plan(
            tp=8,
            pp=self.pp,
            megatron_sp=recompute == "selective",
            schedule="interleaved" if chunks else "1f1b",
            chunks=chunks,
        )
        model = named(self.model, fused=False)
        machine = load_machine("a100-selene")
        return Job(model, machine, plan, self.rows, self.rows // self.microbatch, recompute, MEGATRON_2022)


KORTHIKANTI = [
    Korthikanti(
        *("gpt-22b", 1, 1, 4, 4, 1.42, 1.10, 41.5), (45.5625, 59.25, 9.5625), (66.84, 49.42, 16.18, 7.64)
    ),
    Korthikanti(
        *("gpt3-175b", 8, 3, 64, 1, 18.13, 13.75, 51.4),
        (45.5625, 66.84375, 12.3516),
        (62.04, 56.53, 18.49, 8.71),
    ),
    Korthikanti(
        *("gpt-530b", 35, 3, 280, 1, 49.05, 37.83, 56.0),
        (31.640625, 114.0234, 23.0762),
        (58.31, 62.04, 20.27, 9.42),
    ),
    Korthikanti(
        *("gpt-1t", 64, 1, 512, 1, 94.42, 71.49, 56.3),
        (32.958984, 131.25, 26.5625),
        (58.31, 62.04, 20.27, 9.42),
    ),
]

# Table 4 of the same: milliseconds of one layer of the 22B model, (forward, backward), and what selective
# recomputation adds. The constants of machines/a100-selene.toml were fitted on it.
LAYER_22B = {"tp": (7.7, 11.9), "sequence parallel": (7.2, 11.8)}
SELECTIVE_22B = 13.2 - 11.9


class Sc21(NamedTuple):
    """Table 1 of Narayanan et al. 2021, microbatches and chunks from its scripts. tflops: per GPU, as they
    count.
    """

    model: str
    billions: float
    tp: int
    pp: int
    dp: int
    rows: int
    microbatch: int
    chunks: int
    tflops: float

    def plan(self):
        chunks = self.chunks if self.chunks > 1 else None
        schedule = "interleaved" if chunks else "1f1b"
        return Plan(tp=self.tp, pp=self.pp, dp=self.dp, schedule=schedule, chunks=chunks)

    def job(self):
        model, machine = named(self.model, fused=False), load_machine("a100-selene")
        microbatches = self.rows // self.dp // self.microbatch
        return Job(model, machine, self.plan(), self.rows, microbatches, "full", MEGATRON_2021)

    def seconds(self):
        """Of a step, from the throughput that is printed and the FLOPs that their formula counts."""
        model = named(self.model)
        h, l, s, v = model.hidden, model.layers, model.sequence, model.vocab
        flops = 96 * self.rows * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h))
        return flops / (self.tflops * 1e12 * self.tp * self.pp * self.dp)


SC21 = [
    Sc21("gpt-1.7b", 1.7, 1, 1, 32, 512, 16, 1, 137),
    Sc21("gpt-3.6b", 3.6, 2, 1, 32, 512, 16, 1, 138),
    Sc21("gpt-7.5b", 7.5, 4, 1, 32, 512, 16, 1, 142),
    Sc21("gpt-18b", 18.4, 8, 1, 32, 1024, 8, 1, 135),
    Sc21("gpt-39b", 39.1, 8, 2, 32, 1536, 4, 1, 138),
    Sc21("gpt-76b", 76.1, 8, 4, 32, 1792, 2, 3, 140),
    Sc21("gpt-145b", 145.6, 8, 8, 24, 2304, 2, 2, 148),
    Sc21("gpt-310b", 310.1, 8, 16, 15, 2160, 1, 2, 155),
    Sc21("gpt-530b", 529.6, 8, 35, 9, 2520, 1, 3, 163),
    Sc21("gpt-1t", 1008.0, 8, 64, 6, 3072, 1, 1, 163),
]

# (layers, hidden, heads) of figure 13 of the same: tp x pp = 64, microbatches of one row, 1F1B,
# recomputation, batches of 32 and 128 rows. The paper's text: best with tp as wide as a node.
FIGURE_13 = 32, 20480, 128

# Qi et al. 2024 (zero bubble), tables 9 and 5: (layers, pp, m, T_F, T_B, T_W, T_comm in ms, bubble of 1F1B,
# interleaved, ZB-H1). Chunks of the interleaved one are layers per stage, which the paper does not say.
ZERO_BUBBLE = [
    (22, 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585),
    (22, 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242),
    (22, 8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674),
    (30, 8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808, 0.1323),
    (30, 8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628, 0.1045),
    (30, 8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320, 0.0554),
    (46, 16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1104, 0.1397),
    (46, 16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.0852, 0.1088),
    (46, 16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0445, 0.0576),
    (62, 32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1493, 0.1421),
    (62, 32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1164, 0.1106),
    (62, 32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0624, 0.0594),
]
