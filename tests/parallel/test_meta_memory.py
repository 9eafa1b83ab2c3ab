"""The memory that parallelize() takes for a model on meta: this rank's share, a block, and some megabytes.

The peak is what the kernel has counted for the process (VmHWM): parameters, buffers, pages of the files.
"""

import pytest
import torch
from halves import quick
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par

hf = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
hf.utils.logging.disable_progress_bar()

SIZES = {"vocab_size": 4000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8}
CONFIG = hf.LlamaConfig(num_attention_heads=8, use_cache=False, **SIZES)
MODEL, BLOCK = 117.6e6, 12.7e6  # bytes in fp32
SLACK = 24e6  # of it 8 for pages of a file, and what the allocator has and nobody uses
SHARES = {"tp=2,pp=2": MODEL / 4, "dp=2,zero=3": MODEL / 2, "pp=2": MODEL / 2}


def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def write(rank, world_size, folder):
    """In a process of its own, whose memory nobody takes over."""
    model = hf.LlamaForCausalLM(CONFIG)
    assert sum(p.numel() * 4 for p in model.parameters()) == pytest.approx(MODEL, rel=0.01)
    assert sum(p.numel() * 4 for p in model.model.layers[0].parameters()) == pytest.approx(BLOCK, rel=0.01)
    model.save_pretrained(folder, max_shard_size="8MB")


def peak(rank, world_size, text, folder, whole):
    with torch.device("meta"):
        small = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "hidden_size": 32, "intermediate_size": 32}))
    par.parallelize(small, None, par.Plan.parse(text))  # pages of libraries are there from now on
    with open("/proc/self/clear_refs", "w") as mark:
        mark.write("5")  # the peak begins anew
    before = memory("VmRSS")
    if whole:
        model, folder = hf.LlamaForCausalLM.from_pretrained(folder), None
    else:
        with torch.device("meta"):
            model = hf.LlamaForCausalLM(CONFIG)
    par.parallelize(model, None, par.Plan.parse(text), weights=folder)
    return memory("VmHWM") - before


@tier(slow=1 / 2)
@pytest.mark.parametrize("text", quick(SHARES, "dp=2,zero=3"))
def test_peak_is_the_share_and_a_block(tmp_path, text):
    spawn(1, write, tmp_path)
    bound = SHARES[text] + BLOCK + SLACK
    size = par.Plan.parse(text).world_size
    loaded = spawn(size, peak, text, tmp_path, False)
    initialised = spawn(size, peak, text, None, False)
    whole = spawn(size, peak, text, tmp_path, True)
    assert max(loaded) < bound, (text, loaded, bound)
    assert max(initialised) < bound, (text, initialised, bound)
    assert min(whole) > bound, "this test would not see a whole model"
