"""One writer per run directory: a lock that the system releases when its process ends, however it ends."""

import os
from pathlib import Path
from typing import Any

from caden.errors import CadenError

try:
    import fcntl
except ImportError:  # not on every system; there, nothing is locked
    fcntl = None  # type: ignore[assignment]


class DirectoryLock:
    """The lock of a run directory: its file `.lock`, which names the process that holds it."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._file: Any = None

    def acquire(self) -> None:
        """Acquire the lock, or raise an error that names the process holding it."""
        if fcntl is None or self._file is not None:
            return
        file = (self._directory / ".lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise CadenError(
                f"{self._directory} is in use by process {holder}: wait until it ends, or stop it first."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None
