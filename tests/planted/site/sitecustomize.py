"""Measures a Python process that a test starts anew. See [Note: processes] in reach.py."""

import os
import sys

if "PLANTED_REACH_FOLDER" in os.environ and "PLANTED_REACH_TEST" in os.environ:
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from planted import reach

    sys.path.pop()
    reach.start()
