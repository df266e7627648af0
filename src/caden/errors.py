"""Errors of two kinds: bad input (exit code 2) and failed runs (exit code 1)."""

import math
import numbers
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class CadenError(ValueError):
    """Bad input: one line with the argument, the rule, the value received and what to do."""


class RunError(RuntimeError):
    """A run that could not finish; `result` contains what it recorded until then."""

    result: Any = None  # a `caden.Result`


class Diverged(RunError):
    """The iterates became non-finite or exceeded every reasonable bound."""


class Interrupted(RunError):
    """The run was interrupted with Ctrl-C; it can be resumed."""


class LoopEnded(Exception):
    """No more gradients come, because the training loop that gives them has ended. Never reaches the user."""


def require_choice(kind: str, name: object, known: Iterable[str]) -> str:
    """Return `name` if it is known, otherwise suggest the nearest known name."""
    known = sorted(known)
    if not isinstance(name, str):
        raise CadenError(f"Unknown {kind} {name!r}; known: {', '.join(known)}.")
    if name in known:
        return name
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}."
    raise CadenError(f"Unknown {kind} {name!r}; {hint}")


def require_number(name: str, value: object) -> float:
    """Return `value` if it is a finite real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise CadenError(f"`{name}` must be a number, got {value!r}.")
    return float(value)


def require_flag(name: str, value: object) -> bool:
    """Return `value` if it is true or false."""
    if not isinstance(value, bool):
        raise CadenError(f"`{name}` must be true or false, got {value!r}.")
    return value


def require_positive(name: str, value: object) -> float:
    """Return `value` if it is a number above zero."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise CadenError(f"`{name}` must be a positive number, got {value!r}.")
    return float(value)


def require_fraction(name: str, value: object, interval: str = "(0, 1)") -> float:
    """Return `value` if it is a number between 0 and 1; a square bracket of the interval lets its end in."""
    number = require_number(name, value)
    if not 0 <= number <= 1 or (number == 0 and interval[0] == "(") or (number == 1 and interval[-1] == ")"):
        raise CadenError(f"`{name}` must lie in {interval}, got {value}.")
    return number


def require_integer(name: str, value: object, least: int = 0) -> int:
    """Return `value` if it is a whole number not below `least` (and below 2^63)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) < 2**63:
        raise CadenError(f"`{name}` must be a whole number of at least {least}, got {value!r}.")
    return int(value)
