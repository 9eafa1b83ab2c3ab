"""python -m pycomm.doctor: what is slow or missing for pycomm on this machine, and how to mend it.

    python -m pycomm.doctor [--json]                        this process; a group of two ranks is tried
    torchrun --nproc-per-node 8 -m pycomm.doctor            all ranks are asked, rank 0 prints

Reading order: facts.py (what one rank finds out), ranks.py (how rank 0 gets the facts of all), checks.py
(what they mean; no access to the machine), __main__.py (the command).
"""
