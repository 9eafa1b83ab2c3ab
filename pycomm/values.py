"""The values of variables of the environment, as texts that mean numbers and words. Each function raises
ValueError with the variable's name, its value and what is allowed. Who reads the environment: env.py.
"""

import re
from typing import TypeVar

__all__ = ["LONGEST_TIMEOUT", "OPERATIONS", "algorithms", "integer", "nbytes", "one_of", "seconds", "wrong"]

Word = TypeVar("Word", bound=str)
# what PYCOMM_ALGORITHM may name
OPERATIONS = "all_reduce reduce broadcast all_gather reduce_scatter all_to_all gather scatter".split()
OPERATIONS += ["send", "recv", "barrier"]
LONGEST_TIMEOUT = 1e8  # seconds, three years: nothing waits without a limit


def wrong(name: str, value: str, allowed: str) -> ValueError:
    return ValueError(f"{name}={value!r} in the environment: must be {allowed}.")


def one_of(name: str, value: str | None, words: tuple[Word, ...]) -> Word | None:
    """The value of a variable that may be one of these words; None: it is not set."""
    for word in words:
        if word == value:
            return word
    if value is not None:
        raise wrong(name, value, (" or " if len(words) == 2 else ", ").join(words))
    return None


def integer(name: str, value: str, low: int, high: int | None = None) -> int:
    number = int(value) if re.fullmatch(r"\d{1,18}", value, re.ASCII) else -1
    if number < low or (high is not None and number > high):
        allowed = f", {low} or more" if high is None else f" from {low} to {high}"
        raise wrong(name, value, f"a whole number{allowed}")
    return number


def seconds(name: str, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= LONGEST_TIMEOUT:  # also refuses nan
        raise wrong(name, value, "a number of seconds above 0 and at most 1e8")
    return number


def nbytes(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,15})([KMG]?)", value.upper(), re.ASCII)
    if not match or int(match[1]) == 0:
        raise wrong(name, value, "a number of bytes above 0, which may end in K, M or G (powers of 1024)")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def algorithms(name: str, value: str | None) -> dict[str, str]:
    """ "all_reduce=ring,broadcast=direct" as a dict. Which algorithms an operation has is the extension's to
    say.
    """
    chosen: dict[str, str] = {}
    for pair in value.split(",") if value else ():
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\w+)\s*", pair)
        if not match or match[1] not in OPERATIONS or match[1] in chosen:
            allowed = f"op=algorithm pairs with commas between them, each op once, of {', '.join(OPERATIONS)}"
            raise wrong(name, value or "", allowed)
        chosen[match[1]] = match[2]
    return chosen
