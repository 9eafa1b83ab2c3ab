"""Random kills as in recovery_kills.py, of the ranks that `python -m pycomm.run` has started, and of those
that it puts in their places.

    python tests/recovery_launched.py 1 --runs 20    seeds 1 to 20

Some scripts make the default group at their top, some trainings take as long as a new process needs to come,
others wait for it. The launcher must end with 0, and leave nothing.
"""

import os
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import recovery_kills as kills
import torch
import torch.distributed as dist
from adopted import adopting
from recovery_cases import RANKS, Case, Victim, draw
from recovery_witness import DEATH, Board, Times

ROOT = Path(__file__).parents[1]
REPLACEMENTS = 8  # more than a case kills


def draw_launched(seed: int) -> Case:
    """Each original, and in some runs whoever is the first or the second to take a place."""
    case, draws = draw(seed), random.Random(f"launched {seed}")
    victims = dict(case.victims)
    for number in (1, 2):
        victim = Victim(
            draws.choice(("step", "piece", "rebuild")), draws.randint(1, 3), draws.choice([0.0, 0.1])
        )
        if draws.random() < 0.3:
            victims.update({RANKS * number + place: victim for place in range(RANKS)})
    wait, pace = draws.choice([(60.0, 0.0), (0.0, 1.0)])
    early, forked = draws.random() < 0.5, draws.random() < 0.3
    return case._replace(victims=victims, replaced=True, wait=wait, pace=pace, early=early, forked=forked)


def rank_main(folder: str) -> None:
    slot = int(os.environ["RANK"]) + RANKS * int(os.environ["PYCOMM_REPLACEMENT"])
    case = pickle.loads(Path(folder, "case").read_bytes())
    torch.set_num_threads(1)
    if case.early:
        dist.init_process_group("pycomm")
    result = kills.train(slot, case, Board(Path(folder, "board")), folder, timeout=kills.LIMIT)
    Path(folder, f"result{slot}").write_bytes(pickle.dumps(result))


def check(case: Case, reference: kills.Ended, times: Times | None = None) -> dict[int, str]:
    """As kills.check()."""
    with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
        board = Board(Path(folder, "board"))
        Path(folder, "case").write_bytes(pickle.dumps(case))
        with adopting(lambda: board.those("child").values()):
            status, said = launch(folder)
        kinds = dict.fromkeys(board.those("struck"), DEATH)
        paths = {slot: Path(folder, f"result{slot}") for slot in board.those("pid")}
        results = {slot: pickle.loads(path.read_bytes()) for slot, path in paths.items() if path.exists()}
    left = {*range(RANKS)} - {*kinds} - {*results}
    assert status == 0 and results and not left, f"status {status}, ranks {left} have no result: {said}"
    kills.check_results(case, results, reference)
    kills.check_witnesses(case, results, board, kinds, times or Times())
    return kinds


def launch(folder: str) -> tuple[int, str]:
    """The status of the launcher, and what was printed as an error."""
    launcher = [
        sys.executable,
        "-m",
        "pycomm.run",
        "--nproc",
        str(RANKS),
        "--replacements",
        str(REPLACEMENTS),
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    job = subprocess.Popen(
        [*launcher, __file__, folder],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = job.communicate(timeout=kills.LIMIT)[1]
    except subprocess.TimeoutExpired:
        job.terminate()
        said = f"not over after {kills.LIMIT} s: {job.communicate(timeout=kills.LIMIT)[1]}"
    return job.returncode, said


def main() -> int:
    options = kills.arguments(__doc__.splitlines()[0]).parse_args()
    kills.LIMIT = options.limit
    torch.set_num_threads(1)
    reference = kills.alone()
    return kills.repeat(draw_launched, lambda case, times: check(case, reference, times), options)


if __name__ == "__main__":
    if "PYCOMM_REPLACEMENT" in os.environ:
        rank_main(sys.argv[1])
    else:
        sys.exit(main())
