"""pycomm.parallel.expert against the same module in one process."""

import copy

import pytest
import tolerance
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_ranks import spawn

from pycomm.parallel import MoE
from pycomm.parallel.expert import dispatch
from pycomm.parallel.ground import comm

DIM = 6
ROUNDINGS = 8  # see tolerance.py


def make_expert():
    return nn.Sequential(nn.Linear(DIM, 8), nn.GELU(), nn.Linear(8, DIM))


def make_moe(experts, top_k, dtype=torch.float64, **options):
    torch.manual_seed(7 * experts + top_k)
    return MoE(DIM, make_expert, experts, top_k, aux_loss=0.3, **options).to(dtype)


def batch(sizes, dtype=torch.float64):
    """Inputs and the weights of a linear loss, cut by rank."""
    generator = torch.Generator().manual_seed(sum(sizes) + 3)
    x, w = torch.randn(2, sum(sizes), DIM, generator=generator, dtype=torch.float64).to(dtype)
    return x.split(sizes), w.split(sizes)


def run(moe, x, w, needs_grad=True):
    """One forward and backward: output, gradient of the input and of every parameter by name, load-balance
    loss.
    """
    x = x.clone().requires_grad_(needs_grad)
    out = moe(x)
    (out * w).sum().backward()
    grads = {name: parameter.grad for name, parameter in moe.named_parameters()}
    return out.detach(), x.grad, grads, moe.last_aux


def close(actual, expected, what):
    """Inputs and gradients from above are about 1, so that no result is a sum of smaller terms."""
    largest = expected.abs().max().item() if expected.numel() else 0.0
    tolerance.near(what, actual, expected, max(1.0, largest), ROUNDINGS)


def compare(results, oracle, sizes, held):
    """results of `run` by rank against the single process; returns nothing, raises on a difference."""
    out, x_grad, grads, aux = oracle
    for rank, (part, grad_part) in enumerate(zip(out.split(sizes), x_grad.split(sizes), strict=True)):
        close(results[rank][0], part, f"output of rank {rank}")
        close(results[rank][1], grad_part, f"gradient of the input of rank {rank}")
        close(results[rank][3], aux, "load-balance loss")
        first = sum(held[:rank])
        names = {f"experts.{index}." for index in range(first, first + held[rank])}
        assert {name[: name.index(".", 8) + 1] for name in results[rank][2] if name != "gate.weight"} == names
        for name, grad in results[rank][2].items():
            if name != "gate.weight":
                close(grad, grads[name], f"gradient of {name}")
    close(sum(result[2]["gate.weight"] for result in results), grads["gate.weight"], "gradient of the gate")


# experts, top_k, tokens of the ranks
CASES = {
    1: [(1, 1, [5]), (3, 2, [4]), (5, 3, [0])],
    2: [(1, 1, [3, 4]), (2, 1, [5, 0]), (3, 2, [1, 6]), (7, 3, [4, 3]), (5, 2, [0, 0])],
    3: [(2, 2, [3, 1, 2]), (3, 1, [1, 0, 7]), (7, 2, [5, 2, 4]), (4, 3, [0, 0, 1])],
    8: [(7, 3, [2, 0, 1, 3, 1, 1, 4, 1]), (9, 2, [1, 1, 1, 1, 1, 1, 1, 5])],
    4: [(3, 2, [1, 2, 3, 4]), (4, 2, [6, 0, 1, 2]), (6, 1, [2, 2, 2, 2]), (7, 3, [1, 0, 0, 5])],
}


def body_cases(rank, world_size, cases, dtype):
    group = comm.as_group(None, "ep")
    results = []
    for experts, top_k, sizes in cases:
        moe = make_moe(experts, top_k, dtype)
        moe.shard(group, group)
        x, w = batch(sizes, dtype)
        results.append(run(moe, x[rank], w[rank]))
    return results


@pytest.mark.parametrize(
    "world_size, dtype, backend",
    [(n, torch.float64, "pycomm") for n in (1, 2, 3, 4, 8)]
    + [(3, torch.float32, "pycomm"), (3, torch.float64, "gloo")],
)
def test_equals_single_process(world_size, dtype, backend):
    results = spawn(world_size, body_cases, CASES[world_size], dtype, backend=backend)
    for number, (experts, top_k, sizes) in enumerate(CASES[world_size]):
        x, w = batch(sizes, dtype)
        oracle = run(make_moe(experts, top_k, dtype), torch.cat(x), torch.cat(w))
        compare([result[number] for result in results], oracle, sizes, comm.even_sizes(experts, world_size))


def test_module_against_plain_formula():
    """The module in one process against a loop over tokens, written from the papers."""
    for experts, top_k, renormalize in [(5, 2, True), (5, 2, False), (4, 1, None), (3, 3, None)]:
        moe = make_moe(experts, top_k, renormalize=renormalize)
        moe.aux_scale = 0.25
        (x,), (w,) = batch([7])
        out, x_grad, grads, aux = run(moe, x, w)
        plain = make_moe(experts, top_k)
        y = x.clone().requires_grad_()
        p = (y @ plain.gate.weight.T).softmax(-1)
        rows, counts = [], torch.zeros(experts, dtype=torch.float64)
        for token in range(7):
            best = sorted(range(experts), key=lambda e: -p[token, e].item())[:top_k]
            total = (
                sum(p[token, e] for e in best) if renormalize or (renormalize is None and top_k > 1) else 1
            )
            rows.append(sum(p[token, e] / total * plain.experts[str(e)](y[token]) for e in best))
            for e in best:
                counts[e] += 1
        expected_aux = 0.3 * experts * (counts / (7 * top_k) * p.mean(0)).sum()
        ((torch.stack(rows) * w).sum() + 0.25 * expected_aux).backward()
        close(out, torch.stack(rows).detach(), "output")
        close(aux, expected_aux.detach(), "load-balance loss")
        close(x_grad, y.grad, "gradient of the input")
        for name, parameter in plain.named_parameters():
            unused = parameter.grad is None
            close(grads[name], torch.zeros_like(parameter) if unused else parameter.grad, name)


def body_order(rank, world_size, chosen, held):
    group = comm.as_group()
    mine = chosen[rank * 5 : rank * 5 + 5]
    routes, _ = dispatch.make_routes(mine, held, group)
    labels = torch.arange(5)[:, None] + 5 * rank  # the row says which token of the whole batch it is
    rows = dispatch.dispatch(labels, routes, group)
    return [part.flatten().tolist() for part in rows.split(routes.per_expert)]


def test_experts_see_the_order_of_the_single_process():
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(15)])
    for held in ([3, 2, 2], [0, 7, 0]):
        results = spawn(3, body_order, chosen, held)
        expected = [torch.nonzero((chosen == expert).any(1)).flatten().tolist() for expert in range(7)]
        assert [row for result in results for row in result] == expected


def body_mesh(rank, world_size, sizes):
    """dp = 2 x ep = 2: experts over pairs, tokens counted over all four."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    moe = make_moe(5, 2)
    moe.shard(comm.as_group(pairs[rank // 2], "ep"), comm.as_group(None, "data"))
    moe.aux_scale = 0.5
    x, w = batch(sizes)
    return run(moe, x[rank], w[rank])


def test_load_balance_is_counted_over_all_data_ranks():
    sizes = [3, 0, 4, 2]
    results = spawn(4, body_mesh, sizes)
    oracle = make_moe(5, 2)
    oracle.aux_scale = 0.5
    x, w = batch(sizes)
    _, _, grads, aux = run(oracle, torch.cat(x), torch.cat(w))
    for name, grad in grads.items():
        close(sum(result[2][name] for result in results if name in result[2]), grad, name)
    for result in results:
        close(result[3], aux, "load-balance loss")


def body_graphs(rank, world_size):
    """Input without gradient, a frozen gate, recomputation of both kinds: experts on rank 0 only, so that the
    graphs differ most.
    """
    group = comm.as_group(None, "ep")
    x, w = batch([3, 0, 2])
    x, w = x[rank], w[rank]
    found = {}
    for frozen in (False, True):
        moe = make_moe(1, 1)
        moe.shard(group, group)
        moe.gate.requires_grad_(not frozen)
        run(moe, x, w, needs_grad=False)
        found[f"frozen {frozen}"] = {name: p.grad for name, p in moe.named_parameters() if p.grad is not None}
    for reentrant in (False, True):
        moe = make_moe(5, 2)
        moe.shard(group, group)
        y = x.clone().requires_grad_()
        again = checkpoint(lambda z, moe=moe: z + moe(z.sin()), y, use_reentrant=reentrant)
        (again * w).sum().backward()
        found[f"reentrant {reentrant}"] = {name: p.grad for name, p in moe.named_parameters()}
    return found


def test_ranks_stay_in_step():
    checkpoint(
        torch.sin, torch.zeros(1), use_reentrant=False
    )  # its first call imports for seconds: here, once, and not in every rank
    results = spawn(3, body_graphs)
    x, w = (torch.cat(parts) for parts in batch([3, 0, 2]))
    for key in results[0]:
        plain = make_moe(1, 1) if key.startswith("frozen") else make_moe(5, 2)
        out = plain(x) if key.startswith("frozen") else x + plain(x.sin())
        (out * w).sum().backward()
        for name, parameter in plain.named_parameters():
            parts = [result[key][name] for result in results if name in result[key]]
            if key == "frozen True" and name == "gate.weight":
                assert not parts
            else:
                close(sum(parts), parameter.grad, f"{key}: {name}")


def body_zero_gradients(rank, world_size):
    group = comm.as_group(None, "ep")
    moe = make_moe(6, 1)
    moe.shard(group, group)
    with torch.no_grad():  # expert 4, on rank 1, takes all tokens
        moe.gate.weight.zero_()
        moe.gate.weight[4] = 5.0
    return run(moe, torch.ones(3, DIM, dtype=torch.float64), torch.ones(3, DIM, dtype=torch.float64))[2]


def test_experts_without_tokens_get_zero_gradients():
    for rank, grads in enumerate(spawn(2, body_zero_gradients)):
        assert len(grads) == 1 + 3 * 4
        for name, grad in grads.items():
            if name != "gate.weight":
                assert grad is not None and bool(grad.any()) == (
                    rank == 1 and name.startswith("experts.4.")
                ), name


def body_traffic(rank, world_size, sizes):
    group = comm.as_group(None, "ep")
    moe = make_moe(5, 2)
    moe.shard(group, group)
    x, w = batch(sizes)
    chosen = moe.choose(x[rank])[2].flatten()
    first = sum(moe.held[:rank])
    away = ((chosen < first) | (chosen >= first + moe.held[rank])).sum().item()
    with comm.count_traffic() as forward:
        out = moe(x[rank])
    with comm.count_traffic() as backward:
        (out * w[rank]).sum().backward()
    everyone = torch.tensor([away, moe.held[rank]])
    total = torch.empty(2 * world_size, dtype=torch.int64)
    comm.all_gather(total, everyone, group)
    away_all = total.view(-1, 2)[:, 0].sum().item()
    with comm.count_traffic() as evaluated, torch.no_grad():
        moe.eval()(x[rank])
    counts = [
        (t.calls("all_to_all"), t.calls("all_reduce"), t.nbytes("all_to_all"), t.nbytes())
        for t in (forward, backward, evaluated)
    ]
    return away, away_all, 8 * (5 - moe.held[rank]), counts


def test_traffic():
    results = spawn(3, body_traffic, [4, 1, 6])
    row = DIM * 8
    reduced = 2 * 2 * 2 * 5 * 8 // 3
    sent = [0, 0]
    for away, away_all, header, (forward, backward, evaluated) in results:
        assert forward[:2] == (3, 1) and backward[:2] == (2, 0) and evaluated[:2] == (3, 0)
        assert forward[3] - forward[2] == reduced and forward[2] == evaluated[2]
        assert (
            forward[2] - header == backward[2] >= away * row
        )  # dispatch of own tokens and the way back of the others'
        sent[0] += backward[2]
        sent[1] = 2 * away_all * row
    assert sent[0] == sent[1]


def body_alone(rank, world_size):
    torch.manual_seed(rank)  # gates differ until rank 0's is taken
    moe = MoE(DIM, make_expert, 3, 2, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"rank \d.*already laid over 2 ranks \('ep'\)"):
        moe.shard(None, None)
    with pytest.raises(ValueError, match="last dimension is 5, dim=6"):
        moe(torch.zeros(2, 5))
    return moe.gate.weight.detach(), sorted(moe.state_dict())


def test_group_at_construction_and_errors():
    (gate, names), (other_gate, other_names) = spawn(2, body_alone)
    assert torch.equal(gate, other_gate)
    assert not set(names) & set(other_names) - {"gate.weight"}
    assert set(names) | set(other_names) == set(make_moe(3, 2).state_dict())
    for options in ({"num_experts": 0}, {"num_experts": 2, "top_k": 3}, {"num_experts": 2, "top_k": 0}):
        with pytest.raises(ValueError, match="top_k="):
            MoE(DIM, make_expert, **options)
    with pytest.raises(ValueError, match="not a module"):
        MoE(DIM, make_expert(), 2)
    same = make_expert()
    with pytest.raises(ValueError, match="same module twice"):
        MoE(DIM, lambda: same, 2)


def test_plain_module():
    """Any leading shape, 16 bit, copies, evaluation."""
    moe = make_moe(4, 2, torch.bfloat16)
    x = torch.randn(2, 3, DIM).bfloat16()
    assert moe(x).shape == x.shape and moe(x).dtype == torch.bfloat16 and moe.last_aux.dtype == torch.float32
    clone = copy.deepcopy(moe).eval()
    clone.last_aux = None
    assert torch.equal(clone(x), moe(x)) and clone.last_aux is None
    with torch.autocast("cpu", torch.bfloat16):
        assert make_moe(4, 2, torch.float32)(x.float()).dtype == torch.float32
