"""setup.py as a module, without building anything: `from build_script import build`."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("pycomm_setup", Path(__file__).parent.parent / "setup.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)
