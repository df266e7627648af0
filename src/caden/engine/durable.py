"""Files that survive a power cut: a reader sees the old content or the new, never a part.

A write goes to a file with another name, which is forced to disk before it replaces the old one. Then the folder is
forced to disk as well. Only the functions at the top touch the disk.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def create(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a new file."""
    fill(path)


def append(path: Path, data: bytes) -> None:
    """Add bytes to the end of a file."""
    with path.open("ab") as file:
        file.write(data)


def truncate(path: Path, size: int) -> None:
    """Cut a file to its first `size` bytes."""
    os.truncate(path, size)


def rename(source: Path, target: Path) -> None:
    """Rename a file, replacing any file that has the new name."""
    os.replace(source, target)


def remove(path: Path) -> None:
    """Delete a file."""
    path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Force a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Force the names in a folder to disk, where the system supports it."""
    with suppress(OSError):  # some systems cannot open a folder
        sync(path)


def replace(path: Path, fill: Callable[[Path], object], durable: bool = True) -> None:
    """Replace a file with what `fill` writes; force it to disk unless `durable` is False."""
    scratch = path.with_name(f"{path.name}.tmp")
    try:
        create(scratch, fill)
        if durable:
            sync(scratch)
        rename(scratch, path)
    except BaseException:
        with suppress(OSError):
            remove(scratch)
        raise
    if durable:
        sync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file with `text`."""
    replace(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))
