"""What the program of random kills takes for the blamed one, and that it raises where that is nobody who was
struck.
"""

import os
from pathlib import Path

import pytest
from recovery_witness import Board, Loss, Witness, judge

import pycomm

HERE = "[rank 0/3 of group 0] all_reduce #22: "
NESTED = "rank 1 aborted the group. Rank 3 had raised PeerError: [rank 1/2 of group 2] recv: rank 0 died. "


@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        (pycomm.PeerError(f"{HERE}rank 1 died (its process ended)", peer=1), 2),
        (pycomm.PeerError("[rank 0/2 of group 4] recv: rank 0 died. In the plan it is rank 2.", peer=0), 3),
        (pycomm.AbortedError(f"{HERE}rank 1 aborted the group", peer=1), None),
        (pycomm.AbortedError(f"{HERE}{NESTED}In the plan it is rank 2.", peer=1), 3),
        (pycomm.AbortedError(f"{HERE}{NESTED}", peer=1), 0),
        (
            pycomm.AbortedError(f"{HERE}rank 1 ... Rank 2 had raised AbortedError: rank 0 aborted", peer=1),
            None,
        ),
        (pycomm.CommError("creating the group: the store of rank 0 (host0) does not answer: ...", peer=1), 0),
        (pycomm.PeerError(f"process {os.getpid()}, a rank of the crew, died"), 7),
        (pycomm.PeerError("a rank of the crew was lost while the others made a group"), None),
    ],
    ids=lambda value: str(value).replace(str(os.getpid()), "PID")[-40:],
)
def test_who_is_blamed(tmp_path: Path, error: pycomm.CommError, blamed: int | None) -> None:
    """By a rank whose crew is now of slots 0, 2 and 3."""
    board = Board(tmp_path / "board")
    board.note("pid", 7, os.getpid())
    witness = object.__new__(Witness)
    witness.board, witness.members = board, [0, 2, 3]
    assert witness._blamed(error) == blamed


@pytest.mark.parametrize(("blamed", "when", "ok"), [(2, 5.0, True), (2, 3.0, False), (1, 5.0, False)])
def test_the_blamed_was_struck_before(tmp_path: Path, blamed: int, when: float, ok: bool) -> None:
    board = Board(tmp_path / "board")
    Board(tmp_path / "board").note("struck", 2, 4.0)
    losses = [Loss(when, blamed, "rank 1 died"), Loss(when, None, "a rank was lost")]
    if ok:
        assert judge(losses, board) == 1
        return
    with pytest.raises(AssertionError, match=f"'rank 1 died' blames {blamed}; struck were {{2: 4.0}}"):
        judge(losses, board)
