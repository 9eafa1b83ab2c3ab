"""gpu-check's part for pycomm.fused without a GPU: what its checks find when a result is wrong, its parts in
processes, its targets. That they pass on host tensors is tested with the other checks in
test_gpu_check.py."""

import json

import pytest
import torch
from tiers import tier

from gpu import checks, fused_cases, fused_order, fused_values, ranks, steps, summary


def records(check, passed=False):
    return [line for line in map(json.loads, open(check.path)) if passed or line["ok"] is False]


def make_check(folder, name="fused_values"):
    check = ranks.Check(name, folder / "records", on="cpu", seconds=60)
    check.now = "threads"
    return check


def tile_off(out, rank):
    """A tile of 4 x 4 has the values of its neighbour."""
    if out.shape[0] >= 8:
        out[:4, :4] = out[4:8, :4]


def one_element(out, rank):
    if rank == 1 and out.numel():
        out[-1, -1] += 0.3


def not_finite(out, rank):
    out[:1, :1] = float("nan")


@tier(quick=1 / 4)
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("fault", [tile_off, one_element, not_finite])
def test_wrong_values_are_found(op, fault, tmp_path, monkeypatch):
    right = fused_values.run_form

    def planted(problem, *args, **options):
        result = right(problem, *args, **options)
        if problem.n == 264:
            fault(result[0], problem.rank)
        return result

    monkeypatch.setattr(fused_values, "run_form", planted)
    check = make_check(tmp_path)
    fused_values._here(check, [(op, 2)])
    found = records(check)
    wrong = [record for record in found if record["case"].startswith(f"{op} ") and "n=264" in record["case"]]
    assert {record["case"].rsplit(", ", 2)[1] for record in wrong} == {"plain", "chunked"}
    assert (
        all(
            "result at" in record["detail"] or "ranks hold different bits" in record["detail"]
            for record in wrong
        )
        and check.failed
    )
    assert all("n=264" in record["case"] or "every case" in record["case"] for record in found)


def test_wrong_preactivation_gathered_input_and_bits_are_found(tmp_path, monkeypatch):
    right, calls = fused_values.run_form, []

    def planted(problem, form, *args, **options):
        out, z, gathered = right(problem, form, *args, **options)
        if problem.op == "matmul_all_reduce" and problem.rank == 1 and problem.dtype == torch.float32:
            out = out + 1e-7  # within the tolerance
        if problem.op == "all_gather_matmul" and problem.activation == "gelu_tanh":
            gathered = gathered.roll(1, 0)
        if problem.op == "matmul" and problem.activation == "relu":
            z = z.relu()
        if problem.op == "matmul" and problem.activation == "silu" and problem.dtype == torch.float32:
            calls.append(form)
            out = out + 1e-7 * len(calls)
        return out, z, gathered

    monkeypatch.setattr(fused_values, "run_form", planted)
    check = make_check(tmp_path)
    fused_values._here(check, [("matmul", 1), ("all_gather_matmul", 2), ("matmul_all_reduce", 2)])
    found = " | ".join(record["detail"] for record in records(check))
    for text in ("gathered input at", "preactivation at", "other bits", "ranks hold different bits"):
        assert text in found


def test_wrong_gradients_are_found(tmp_path, monkeypatch):
    from pycomm.fused import api

    monkeypatch.setattr(api, "_bias_gradient", lambda dz, needed: dz.sum(0) * 2 if needed else None)
    check = make_check(tmp_path)
    check.each("gradients", 2, fused_values._gradients)
    assert "grad bias differs" in records(check)[0]["detail"]


def test_a_stale_input_is_found(tmp_path, monkeypatch):
    """As if a call read what the one before it had sent."""
    right, last = fused_order.run_form, {}

    def planted(problem, form, group, a, b, bias, **options):
        first = last.setdefault(problem.rank, a)
        return right(problem, form, group, first, b, bias, **options)

    monkeypatch.setattr(fused_order, "run_form", planted)
    check = make_check(tmp_path, "fused_order")
    check.each("late", 2, fused_order._late, "matmul_reduce_scatter")
    assert "call 1: result at" in records(check)[0]["detail"]


@tier(slow=1)
def test_parts_in_processes(tmp_path):
    check = make_check(tmp_path)
    fused_values._apart(check, [("matmul", 1), ("no such operation", 2)])
    found = records(check, passed=True)
    assert sum(record["ok"] for record in found) >= len(fused_cases.matmul_cases())
    assert [record["case"] for record in found if not record["ok"]][
        -1
    ] == "no such operation with 2 ranks, in a process"


def test_cases_cover():
    """Every dtype, activation, configuration, an empty piece, a cut middle dimension."""
    for n in (2, 8):
        for op in fused_cases.COLLECTIVES:
            table = fused_cases.collective_cases(op, n)
            assert {case.dtype for case in table} == set(fused_cases.TOLERANCES)
            configs = {name for case in table for name in case.configs}
            assert configs >= ({"one_shot", "two_shot"} if op == "matmul_all_reduce" else {"small"}) | {
                "default",
                "pointers",
                "crowded",
            }
            assert op == "matmul_all_reduce" or any(case.outer > 1 and 0 in case.sizes for case in table)
            assert any(case.save for case in table) and any(case.keep for case in table) == (
                op == "all_gather_matmul"
            )
    assert {case.activation for case in fused_cases.matmul_cases()} == set(fused_cases.ACTIVATIONS)


def test_form_is_forced_for_values():
    (step,) = steps.choose(only=["fused_values"])
    assert step.command[:2] == ("env", "PYCOMM_FUSED=fused") and checks.CHECKS["fused_order"].variables == ()


def bench(step, *rows):
    """rows: (variant, epilogue, times faster than others)."""
    common = {
        "op": "matmul",
        "m": 8,
        "n": 8,
        "k": 8,
        "missing": None,
        "time_us": 2.0,
        "gflops": 1.0,
        "error": 0.0,
        "choice": "fused: why",
    }
    made = [
        {**common, "variant": variant, "epilogue": epilogue, "times_faster": {"plain": 1.0, **faster}}
        for variant, epilogue, faster in rows
    ]
    made.append({**common, "variant": "symm_mem", "epilogue": "bare", "missing": "needs a GPU for each rank"})
    outcome = steps.Outcome(steps.choose(only=[step])[0], "pass", 1.0)
    return outcome._replace(bench={"kind": "fused", "rows": made, "notes": [], "stopped": ""})


def test_equal_code_is_not_compared():
    """Where plain is chosen, the figures of a target on the choice are noise."""
    outcome = bench(
        "bench_fused_8",
        ("pycomm.fused", "bare", {"plain": 0.97}),
        ("pycomm.fused", "gelu_tanh", {"plain": 1.2}),
    )
    first, second = outcome.bench["rows"][:2]
    first["choice"] = "plain: it was faster"
    judged = summary.contents([outcome], {}, "command")["targets"][-1]
    assert (judged["measured"], judged["met"]) == (1.2, True)
    assert judged["note"] == "1 of 2 cases chose plain: equal code, met"
    second["times_faster"] = {"plain": 0.9}
    assert summary.contents([outcome], {}, "command")["targets"][-1]["met"] is False
    second["choice"] = "plain: no room"
    report = summary.contents([outcome], {}, "command")
    assert (report["targets"][-1]["measured"], report["targets"][-1]["met"]) == (None, True)
    assert "| 2 of 2 cases chose plain: equal code, met | yes |" in summary.markdown(report)
    outcome.bench["rows"][:2] = []
    assert summary.contents([outcome], {}, "command")["targets"][-1]["met"] is None


def test_targets():
    outcomes = [
        bench(
            "bench_fused_matmul",
            ("fused", "bare", {"plain": 0.93}),
            ("fused", "gelu_tanh", {"addmm_act": 0.8}),
            ("plain", "bare", {}),
        ),
        bench(
            "bench_fused_2",
            ("pycomm.fused", "gelu_tanh", {"plain": 1.2}),
            ("pycomm.fused", "gelu_tanh", {"plain": 0.99}),
        ),
        bench("bench_fused_4", ("pycomm.fused", "gelu_tanh", {"plain": 1.0})),
        bench(
            "bench_fused_8",
            ("pycomm.fused", "gelu_tanh", {"plain": 0.9}),
            ("fused", "gelu_tanh", {"plain": 0.5}),
        ),
    ]
    report = summary.contents(outcomes, {}, "command")
    judged = [(target["measured"], target["met"]) for target in report["targets"][7:]]
    assert judged == [(0.93, True), (0.8, False), (0.99, False), (1.0, True), (0.9, False)]
    unmeasured = summary.contents(outcomes[:1], {}, "command")["targets"][8:]
    assert [(target["measured"], target["met"]) for target in unmeasured] == [(0.8, False)] + [
        (None, None)
    ] * 3
    text = summary.markdown(report)
    assert (
        "| matmul | 8x8x8 | bare | fused | 2 | 1 | 0.93 | 0e+00 |  |" in text
        and "needs a GPU for each rank" in text
    )
    assert summary.exit_code(report) == 2
