"""What a process that takes the place of a dead one gets back, under python -m pycomm.run, in a script as
users write it: init_process_group at its top, a scheduler, an average of the parameters, a loader of its own.
"""

import json

import pytest
import recovery_kills as kills
import recovery_launched
import torch
from test_run import run
from tiers import tier

import pycomm.parallel as par

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
    import json, os, signal, sys
    import torch, torch.distributed as dist
    import pycomm.parallel as par
    import recovery_kills as kills

    torch.set_num_threads(1)
    keeps, early, plan = json.loads(sys.argv[1])
    rank, is_new = int(os.environ["RANK"]), os.environ["PYCOMM_REPLACEMENT"] != "0"
    class Average:
        def __init__(self, model):
            self.values = {name: value.detach().clone() for name, value in model.named_parameters()}

        def update(self, model):
            for name, value in model.named_parameters():
                self.values[name].lerp_(value.detach(), 0.1)

        def state_dict(self):
            return self.values

        def load_state_dict(self, state):
            self.values = state

    class Loader:
        def __init__(self):
            self.next = 0

        def __next__(self):
            self.next += 1
            return kills.batch(self.next - 1)

        def state_dict(self):
            return self.next

        def load_state_dict(self, state):
            self.next = state

    def train(step, numbers, model, scheduler, average, loader):
        losses = []
        for number in numbers:
            if (rank, number) == (1, 5) and not is_new and step is not alone:
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(step(next(loader)).item())
            scheduler.step()
            average.update(model)
        return losses

    def beside(model, opt):
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        return scheduler, Average(model), Loader()

    own, own_opt = par.parallelize(*kills.make(), par.Plan())
    alone = lambda batch: par.step(own, own_opt, batch, clip=1.0)
    things = beside(own, own_opt)
    expected = train(alone, range(kills.STEPS), own, *things)

    said = ""
    if early:
        dist.init_process_group("pycomm")
        assert (dist.get_rank(), dist.get_world_size()) == (rank, int(os.environ["WORLD_SIZE"]))
        if is_new:
            try:
                dist.barrier()
            except dist.DistError as error:
                said = str(error)

    model, opt = kills.make()
    run = par.resilient(model, opt, plan, snapshot_every=2, wait=100)
    names = ["scheduler", "average", "loader"]
    found = dict(zip(names, beside(model, opt)))
    for name in keeps if not is_new or keeps != ["scheduler"] else ():
        run.keep(name, found[name])
    if "loader" not in keeps:
        found["loader"].next = run.done
    try:
        step = lambda batch: run.step(batch, clip=1.0)
        losses = train(step, run.steps(kills.STEPS), model, *found.values())
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
        sys.exit()
    state, right = par.full_state_dict(model), dict(own.named_parameters())
    apart = lambda some, others: max((some[name] - others[name]).abs().max().item() for name in others)
    print(json.dumps({
        "new": is_new,
        "parameters": apart(state, right),
        "average": apart(found["average"].values, things[1].values),
        "losses": max(abs(a - b) for a, b in zip(losses[::-1], expected[::-1])),
        "steps": len(losses),
        "rate": opt.param_groups[0]["lr"] - own_opt.param_groups[0]["lr"],
        "said": said,
    }))
"""


def results(tmp_path, *case):
    status, out, err = run(tmp_path, SCRIPT, "--nproc", "2", arguments=[json.dumps(case)])
    lines = [json.loads(line.partition("] ")[2]) for line in out if "{" in line]
    return status, lines, err


@tier(quick=1 / 3)
@pytest.mark.parametrize(
    ("early", "plan"),
    [(True, "dp=2,zero=1"), (False, "dp=2"), (True, "dp=2,zero=2")],
    ids=str,
)
def test_all_that_is_kept_comes_back(tmp_path, early, plan):
    status, found, err = results(tmp_path, ["scheduler", "average", "loader"], early, plan)
    assert status == 0 and len(found) == 2, err
    for each in found:
        assert each["steps"] == (kills.STEPS - 4 if each["new"] else kills.STEPS)
        for name in ("parameters", "average", "losses", "rate"):
            assert abs(each[name]) <= kills.TOLERANCE, (name, each, err)
        assert ("has no peers before par.resilient()" in each["said"]) == (early and each["new"])
    assert sum(each["new"] for each in found) == 1 and "came later" not in err


@tier(deep=1)
@pytest.mark.parametrize("seed", [2, 4, 10])
def test_random_kills(seed: int) -> None:
    recovery_launched.check(recovery_launched.draw_launched(seed), kills.alone())


@tier(slow=1)
def test_the_hyperparameters_of_the_survivors_count(tmp_path):
    """Of a scheduler that is not kept: the replacement has begun it anew, and says so."""
    status, found, err = results(tmp_path, [], True, "dp=2,zero=1")
    assert status == 0 and len(found) == 2, err
    for each in found:
        assert max(each["parameters"], each["losses"]) <= kills.TOLERANCE, (each, err)
    assert "this rank came later, and its optimizer has lr=0.01, where rank 0 has lr=0.002" in err
    assert 'run.keep("scheduler", scheduler)' in err


@tier(slow=1)
def test_ranks_that_keep_other_names_are_refused(tmp_path):
    _, found, _ = results(tmp_path, ["scheduler"], False, "dp=2")
    texts = [each["error"] for each in found]
    assert len(texts) == 2
    for text in texts:
        assert "rank 0 keeps ['scheduler'] and rank 1 keeps []" in text and "before its first step" in text


def test_what_cannot_be_kept_is_refused():
    model, opt = kills.make()
    run = par.resilient(model, opt, par.Plan())
    with pytest.raises(ValueError, match=r"run.keep\('rate', float\): it needs state_dict\(\)"):
        run.keep("rate", 0.1)
    run.keep("opt", opt)
    with pytest.raises(ValueError, match=r"there is one of this name already \(AdamW\)"):
        run.keep("opt", torch.optim.SGD([torch.zeros(1)], 0.1))
    run.close()
