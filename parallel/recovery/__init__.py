"""Trainings that lose ranks and go on; docs/recovery.md. training.py has the picture.

training.py       resilient(), and the steps and recoveries of a training
crew.py           all ranks of a run, those without a part in the plan too
smaller.py        the plan for the ranks that are left
pristine.py       model and optimizer as they were before parallelize()
snapshot.py       what a snapshot holds, who writes it, and how another plan reads it
program.py        what a snapshot has of the program: generators, what it keeps, hyperparameters
memory.py         memory of snapshots, which outlives its process
holdings.py       which snapshots exist, and who holds them
neighbours.py     copies of snapshots on the next host
store.py          stores for torch's groups that raise when a member has died
checkpoints.py    the checkpoint to go back to when no snapshot is whole
"""

from pycomm.parallel.recovery.training import Resilient, resilient

__all__ = ["Resilient", "resilient"]
