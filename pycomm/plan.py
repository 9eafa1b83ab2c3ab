"""`python -m pycomm.plan`. The planner is a part of pycomm.parallel, which lies above this package and is
started by name; see docs/planning.md.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("pycomm.parallel.planning", run_name="__main__", alter_sys=True)
