"""The messages between peers: notices and pieces of rows, packed and checked. A message begins with its format.

A version numbers what an agent publishes. An agent that finds that its neighbours know later versions than its own has
lost steps (its directory was replaced, or the power failed): it begins another life, whose versions are all later.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import torch

FORMAT = 3  # of messages; caden 0.1 spoke format 1, without lives; format 2 had no differences
CHUNK = 1 << 20  # bytes of a row per reply
LIFE = 1 << 40  # versions of one life
LIVES = 1 << 20  # a larger number of lives is a lie
LAST = LIVES * LIFE  # as a version: the last row of agent 0; that of agent k is LAST + k
FINISHED, AGREED, SERVED = 1, 2, 4  # makes no more steps; found that all are calm; needs no more rows

_MAGIC = b"cdn"
_ROW = struct.Struct("<4sBxHqqQQI8s")  # magic, dtype, sender, version, base, all bytes, offset, bytes here, checksum
_NOTE = struct.Struct("<4sHHqq8s")  # magic, sender, agents, newest version, rounds done, checksum
_ENTRY = struct.Struct("<qIB")  # an agent's version, its calm sweeps, flags
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.uint8: 2}
DTYPES = (torch.float32, torch.float64)  # of models


class Entry(NamedTuple):
    """What a peer knows of an agent."""

    version: int = -1  # its step at the time of this report
    calm: int = 0  # sweeps in a row with changes below the tolerance
    flags: int = 0

    def merge(self, other: Entry) -> Entry:
        """Return the newer entry; combine entries of the same step."""
        if self.version != other.version:
            return max(self, other)
        return Entry(self.version, max(self.calm, other.calm), self.flags | other.flags)


class Refused(Exception):
    """A message that is invalid or not the one expected."""


def checksum(data: bytes) -> bytes:
    """Return the digest that travels with a message."""
    return hashlib.blake2b(data, digest_size=8).digest()


def _magic() -> bytes:
    return _MAGIC + bytes([ord("0") + FORMAT])


def _require_format(magic: bytes) -> None:
    if len(magic) < 4 or magic[:3] != _MAGIC:
        raise Refused("a message that is not from caden")
    if magic != _magic():
        raise Refused(f"a message of format {magic[3] - ord('0')}, and this version speaks format {FORMAT}")


def note_size(agents: int) -> int:
    """Return the bytes of a notice."""
    return _NOTE.size + agents * _ENTRY.size


def pack_note(sender: int, newest: int, rounds: int, table: list[Entry]) -> bytes:
    """Encode a notice as bytes."""
    body = b"".join(_ENTRY.pack(*entry) for entry in table)
    head = _NOTE.pack(_magic(), sender, len(table), newest, rounds, bytes(8))
    return _NOTE.pack(_magic(), sender, len(table), newest, rounds, checksum(head + body)) + body


def unpack_note(data: bytes, sender: int, agents: int) -> tuple[int, int, list[Entry]]:
    """Return the newest version, the rounds done and the table of a notice, or raise Refused."""
    _require_format(data[:4])
    if len(data) != note_size(agents):
        raise Refused("a notice of the wrong length")
    magic, who, count, newest, rounds, digest = _NOTE.unpack_from(data)
    body = data[_NOTE.size :]
    if digest != checksum(_NOTE.pack(magic, who, count, newest, rounds, bytes(8)) + body):
        raise Refused("a damaged notice")
    if who != sender or count != agents:
        raise Refused("a notice from another agent")
    table = [Entry(*_ENTRY.unpack_from(body, n * _ENTRY.size)) for n in range(agents)]
    if max(newest, *(entry.version for entry in table)) >= LIVES * LIFE:
        raise Refused("a notice with an absurd version")
    return newest, rounds, table


def pack_row(sender: int, version: int, base: int, dtype: torch.dtype, total: int, offset: int, chunk: bytes) -> bytes:
    """Encode the header of a piece of a row, or of its difference to version `base` if that is not negative."""
    return _ROW.pack(_magic(), _DTYPES[dtype], sender, version, base, total, offset, len(chunk), checksum(chunk))


class RowHeader(NamedTuple):
    """The header of a piece of a row."""

    version: int
    base: int
    total: int
    digest: bytes


def row_like(header: bytes) -> torch.Tensor:
    """Return an empty row of the type and length that the header of its first piece names."""
    _, kind, _, _, _, total, *_ = _ROW.unpack(header)
    dtype = next(dtype for dtype, number in _DTYPES.items() if number == kind)
    return torch.empty(total // dtype.itemsize, dtype=dtype)


def read_row_header(header: bytes, sender: int, sizes: dict[torch.dtype, int], offset: int, length: int) -> RowHeader:
    """Return the header of a piece if it matches the request, else raise Refused; `sizes` are the bytes of a row."""
    if len(header) != _ROW.size:
        raise Refused("a row without a header")
    magic, kind, who, version, base, total, position, size, digest = _ROW.unpack(header)
    _require_format(magic)
    if who != sender:
        raise Refused("a row from another agent")
    if not any(kind == _DTYPES[dtype] and total == bytes_ for dtype, bytes_ in sizes.items()):
        raise Refused("a row of another type or dimension")
    if position != offset or size != length or length != min(CHUNK, total - offset):
        raise Refused("a row of the wrong length")
    return RowHeader(version, base, total, digest)
