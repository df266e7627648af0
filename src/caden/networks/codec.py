"""Compressed rows: what a row looks like on the wire when only some of its entries, or a few bits of each, are sent.

Both compressors return the multiple of a code that is nearest to the row (least squares), so the part left out is never
longer than the row: |v - C(v)| <= |v|. Error feedback then sends that part later.

- Top entries: those of the largest size, with their positions as 32-bit indices or as one bit per entry, whichever is
  shorter.
- Bits: entries are rounded to 2^bits levels, symmetric about zero. In blocks of `BLOCK` entries, so that layers of
  different size do not share one scale. The spacing is the best of three: levels up to the largest entry, those of
  the best uniform quantiser of Gaussian numbers (Max, "Quantizing for minimum distortion", IRE Trans. Inf. Theory 6(1),
  1960), which cuts off the largest entries, and one between. One bit is the sign times the mean size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caden._tensor.rows import rows_separately
from caden.errors import RunError

BLOCK = 2048  # entries that share a scale
# Distance of the levels in standard deviations, for 1 to 8 bits (Max, Table II).
_SPACING = (1.5956, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)


class Codec(NamedTuple):
    """How to send a row in fewer bytes: `top`, the fraction of the entries sent, and `bits` for each of them."""

    top: float | None = None
    bits: int | None = None

    def size(self, width: int, itemsize: int) -> int:
        """Return the bytes of one packed row."""
        entries, positions = width, 0
        if self.top is not None:
            entries = self._entries(width)
            positions = min(4 * entries, -(-width // 8))
        if self.bits is None:
            return positions + entries * itemsize
        return positions + -(-entries // BLOCK) * itemsize + sum(-(-w * self.bits // 8) for w in _widths(entries))

    def pack(self, rows: Tensor) -> Tensor:
        """Return the rows as bytes: (n, d) -> (n, size) uint8."""
        if not len(rows):
            return rows.new_zeros(0, self.size(rows.shape[1], rows.element_size()), dtype=torch.uint8)
        if rows_separately() and len(rows) > 1:  # a row's bits must not depend on the others
            return torch.cat([self.pack(rows[i : i + 1]) for i in range(len(rows))])
        parts = []
        if self.top is not None:
            count, width = self._entries(rows.shape[1]), rows.shape[1]
            kept = rows.abs().topk(count, dim=1).indices.sort(dim=1).values
            if _as_map(count, width):
                parts.append(_pack_bits(torch.zeros_like(rows, dtype=torch.uint8).scatter_(1, kept, 1), 1))
            else:
                parts.append(_as_bytes(kept.int()))
            rows = rows.gather(1, kept)
        if self.bits is None:
            parts.append(_as_bytes(rows))
        else:
            for block in _in_blocks(rows):
                codes, scale = _quantise(block.flatten(0, 1), self.bits)
                parts += [_as_bytes(scale.view(len(rows), -1)), _pack_bits(codes, self.bits).view(len(rows), -1)]
        return torch.cat(parts, dim=1)

    def unpack(self, data: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the rows that `pack` has written: (n, size) -> (n, width)."""
        if not len(data):
            return data.new_zeros(0, width, dtype=dtype)
        reader, kept, entries = _Reader(data), None, width
        if self.top is not None:
            entries = self._entries(width)
            if _as_map(entries, width):
                marks = _unpack_bits(reader.take(-(-width // 8)), width, 1)
                if bool((marks.sum(1) != entries).any()):
                    raise RunError("A compressed message has a wrong number of entries.")
                kept = marks.nonzero()[:, 1].view(len(data), entries)
            else:
                kept = reader.take(4 * entries).view(torch.int32).long()
                if bool(((kept < 0) | (kept >= width)).any()):
                    raise RunError("A compressed message has an entry that does not exist.")
        values = self._values(reader, entries, dtype)
        return values if kept is None else values.new_zeros(len(data), width).scatter_(1, kept, values)

    def _values(self, reader: "_Reader", entries: int, dtype: torch.dtype) -> Tensor:
        itemsize, rows = dtype.itemsize, len(reader.data)
        if self.bits is None:
            return reader.take(entries * itemsize).view(dtype)
        values, whole = [], entries // BLOCK
        for blocks, width in ((whole, BLOCK), (1, entries - whole * BLOCK)):
            if blocks and width:
                scale = reader.take(blocks * itemsize).view(dtype).view(-1, 1)
                coded = reader.take(blocks * -(-width * self.bits // 8)).view(rows * blocks, -1)
                codes = _unpack_bits(coded, width, self.bits)
                values.append((scale * (codes.to(dtype) - (2**self.bits - 1) / 2)).view(rows, -1))
        return torch.cat(values, dim=1)

    def _entries(self, width: int) -> int:
        return max(1, round(float(self.top or 0) * width))


class _Reader:
    """Bytes of rows, read from left to right."""

    def __init__(self, data: Tensor):
        self.data, self._position = data, 0

    def take(self, count: int) -> Tensor:
        part = self.data[:, self._position : self._position + count]
        self._position += count
        return torch.empty_like(part, memory_format=torch.contiguous_format).copy_(part)  # its own memory, for views


def _as_map(entries: int, width: int) -> bool:
    """Return whether one bit per entry is shorter than the indices of those that are sent."""
    return -(-width // 8) < 4 * entries


def _widths(entries: int) -> list[int]:
    return [min(BLOCK, entries - start) for start in range(0, entries, BLOCK)]


def _in_blocks(rows: Tensor) -> list[Tensor]:
    """Return the rows as (n, blocks, BLOCK), and the rest as (n, 1, rest)."""
    whole = rows.shape[1] // BLOCK * BLOCK
    parts = [rows[:, :whole].reshape(len(rows), -1, BLOCK), rows[:, whole:].unsqueeze(1)]
    return [part for part in parts if part.shape[1] and part.shape[2]]


def _quantise(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes 0 .. 2^bits - 1, which stand for code - (2^bits - 1)/2, and the (n, 1) scales."""
    half, square = 2 ** (bits - 1), 0 * rows[:, :1]
    largest = rows.abs().amax(1, keepdim=True) / half
    normal = _SPACING[min(bits, len(_SPACING)) - 1] * torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    normal = torch.minimum(normal / rows.shape[1] ** 0.5, largest)
    best, scale = torch.zeros_like(rows), square.clone()
    for spacing in (largest, (largest * normal).sqrt(), normal):
        codes = torch.where(spacing > 0, rows / spacing, 0).floor().clamp(-half, half - 1)
        along = (rows * (codes + 0.5)).sum(1, keepdim=True)
        length = (codes + 0.5).square().sum(1, keepdim=True)
        better = along**2 / length > square  # the square of what is left out is |row|^2 minus this
        best = torch.where(better, codes, best)
        scale, square = torch.where(better, along / length, scale), torch.where(better, along**2 / length, square)
    return (best + half).to(torch.int32), scale


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (n, w) of so many bits each into bytes, row by row."""
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 16:
        return torch.cat([(codes & 255).to(torch.uint8), (codes >> 8).to(torch.uint8)], dim=1)
    stream = torch.stack([(codes >> bit & 1).to(torch.uint8) for bit in range(bits)], dim=2).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 8)).view(len(codes), -1, 8)
    packed = torch.zeros_like(stream[:, :, 0])
    for bit in range(8):
        packed |= stream[:, :, bit] << bit
    return packed


def _unpack_bits(data: Tensor, width: int, bits: int) -> Tensor:
    """Return the (n, width) codes that `_pack_bits` has packed."""
    if bits == 8:
        return data.to(torch.int32)
    if bits == 16:
        return data[:, :width].to(torch.int32) | data[:, width:].to(torch.int32) << 8
    stream = torch.stack([data >> bit & 1 for bit in range(8)], dim=2).flatten(1)
    stream = stream[:, : width * bits].reshape(len(data), width, bits)
    codes = torch.zeros_like(stream[:, :, 0], dtype=torch.int32)
    for bit in range(bits):
        codes |= stream[:, :, bit].to(torch.int32) << bit
    return codes
