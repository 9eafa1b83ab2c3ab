"""How pycomm reads the files that it has written into PYCOMM_CACHE: the measured table (tuned.py) and the
fused forms (fused/tuner.py). Whatever lies there, reading it ends at once: with the content, or with one of
two kinds of error, which the caller takes for "there is none".
"""

import json
import os
import stat

__all__ = ["MOST_BYTES", "read_json"]

MOST_BYTES = 1 << 20  # a larger file is not one of ours


def read_json(path: os.PathLike[str] | str, most_bytes: int = MOST_BYTES) -> object:
    """The content of a JSON file. Raises OSError where it cannot be read. Raises ValueError, which says why,
    where it is not a regular file, is larger than most_bytes, is not UTF-8 or not JSON, or is nested too
    deeply.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)  # a pipe waits for a writer
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("not a regular file")
        data = b""
        while len(data) <= most_bytes and (more := os.read(fd, most_bytes + 1 - len(data))):
            data += more
    finally:
        os.close(fd)
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise ValueError("not JSON") from None
