"""Code outside caden that a file names: it is announced before it runs, or refused."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from caden.errors import CadenError
from caden.launcher import launched
from caden.registry import code_gate


class OutsideCode(CadenError):
    """A file names code that this command does not run."""


@contextmanager
def outside_code(refuse: bool, why: str = "`--no-code` was given") -> Iterator[None]:
    """Print one line for each module or file that is loaded by name, or refuse them all."""
    announced: set[str] = set()
    job = launched()

    def gate(name: str) -> None:
        source = name.rpartition(":")[0]
        if refuse:
            raise OutsideCode(f"{name!r} names code outside caden, which is not run because {why}.")
        if source not in announced and (job is None or job.rank == 0):
            print(f"caden: running code from {source} ({name})", file=sys.stderr)
        announced.add(source)

    with code_gate(gate):
        yield
