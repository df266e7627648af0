"""Code outside caden that a file names: it is announced before it runs, or refused."""

import sys
from contextlib import AbstractContextManager

from caden.errors import CadenError
from caden.launcher import launched
from caden.registry import code_gate


class OutsideCode(CadenError):
    """A file names code that this command does not run."""

    def __init__(self, name: str, why: str):
        super().__init__(f"{name!r} names code outside caden, which is not run because {why}.")
        self.name = name


class _Gate:
    """Refuses all code outside caden, or prints one line for each module or file that it comes from."""

    def __init__(self, refuse: bool, why: str):
        self._refuse, self._why, self._loaded = refuse, why, dict[str, bool]()  # source -> was printed

    def load(self, name: str) -> None:
        if self._refuse:
            raise OutsideCode(name, self._why)
        self._loaded.setdefault(name.rpartition(":")[0], False)

    def built(self) -> None:
        job = launched()
        for source, printed in self._loaded.items():
            if not printed and (job is None or job.rank == 0):
                print(f"caden: running code from {source}", file=sys.stderr)
            self._loaded[source] = True


def outside_code(refuse: bool, why: str = "`--no-code` was given") -> AbstractContextManager[None]:
    """Print one line for each module or file whose code is loaded by name, or refuse them all."""
    return code_gate(_Gate(refuse, why))
