"""How much memory there is for buffers."""

from pathlib import Path


def available_bytes() -> int | None:
    """What can be allocated without swapping, as the kernel estimates it; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
