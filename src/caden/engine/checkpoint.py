"""Saving and restoring a run's state: safetensors files with a digest, two generations, one part per process.

A generation consists of the parts `checkpoint.ROUND.RANKofWORLD.safetensors`; it counts once all are on disk. The
newest one and the one before it are kept, so a damaged file costs at most the rounds between two checkpoints.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from caden.engine import durable
from caden.errors import CadenError
from caden.networks.transport import Transport

FORMAT = 2  # of run directories and checkpoints; version 0.1 wrote format 1 without labelling it
_PART = re.compile(r"checkpoint\.(\d+)\.(\d+)of(\d+)\.safetensors")


class Part(NamedTuple):
    """What one process saved: the tensors of the agents that it hosts, its counters, and facts about the run."""

    tensors: dict[str, Tensor]
    numbers: dict[str, float]
    facts: dict[str, Any]


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    total = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, each with memory of its own, as the format requires."""
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        shared = any(copy.data_ptr() == other.data_ptr() for other in copies.values() if other.numel())
        copies[name] = copy.clone() if shared else copy
    return copies


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None, sync: bool = True
) -> None:
    """Write a safetensors file; a reader sees the old file or the new one, never a part."""
    storable = _storable(tensors)
    try:
        durable.replace(path, lambda scratch: save_file(storable, scratch, metadata=metadata), sync)
    except SafetensorError as error:
        raise OSError(None, str(error), str(path)) from None


def save(
    path: Path,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    facts: Mapping[str, Any] | None = None,
    sync: bool = True,
) -> None:
    """Write tensors, counters and facts, with a digest of everything."""
    text = json.dumps({"format": FORMAT, "numbers": dict(numbers), "facts": dict(facts or {})})
    tensors = _storable(tensors)
    # One entry: the order of several in the file would be arbitrary, and equal runs must end in equal bytes.
    write_tensors(path, tensors, {"caden": json.dumps({"text": text, "digest": _digest(tensors, text)})}, sync)


def load(path: Path) -> Part:
    """Read what `save` wrote, or raise an error if the file is damaged or of another format."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["caden"])
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        if "numbers" in metadata:
            raise CadenError(f"{path} has format 1 (caden 0.1), and this version reads format {FORMAT}.")
        if _digest(tensors, metadata["text"]) != metadata["digest"]:
            raise KeyError("digest")
        content = json.loads(metadata["text"])
        if content["format"] != FORMAT:
            raise CadenError(f"{path} has format {content['format']}, and this version reads format {FORMAT}.")
        return Part(tensors, content["numbers"], content["facts"])
    except CadenError:
        raise
    except (SafetensorError, KeyError, OSError, ValueError, TypeError, AttributeError) as error:
        raise CadenError(f"{path} is damaged ({error}).") from None


class Checkpoints:
    """The checkpoints of a run directory."""

    def __init__(self, folder: Path, transport: Transport):
        self._folder, self._transport = folder, transport

    def generations(self) -> dict[tuple[int, int], list[Path]]:
        """Return the parts of each complete generation by (round, processes), the newest first."""
        groups: dict[tuple[int, int], dict[int, Path]] = {}
        for path in self._folder.glob("checkpoint.*.safetensors"):
            if match := _PART.fullmatch(path.name):
                index, rank, world = map(int, match.groups())
                groups.setdefault((index, world), {})[rank] = path
        complete = {key: parts for key, parts in groups.items() if set(parts) == set(range(key[1]))}
        return {key: [complete[key][rank] for rank in range(key[1])] for key in sorted(complete, reverse=True)}

    def load(self) -> list[Part] | None:
        """Return the newest generation that is intact in every process, as parts; None if there is none.

        If the number of processes has changed, all parts are read; otherwise only this process's own.
        """
        if any(self._folder.glob("checkpoint.safetensors")) or (self._folder / "checkpoint.json").exists():
            raise CadenError(
                f"{self._folder} was written by caden 0.1 (format 1), and this version resumes format {FORMAT}: use "
                "caden-opt 0.1 for it."
            )
        transport, errors = self._transport, list[str]()
        newest: int | None = None
        for key, parts, error in self._readable():
            if error:
                errors.append(error)
            whole = -transport.reduce([-float(not error)], "max")[0]  # in every process
            newest = key[0] if newest is None else newest
            if whole and parts is not None:
                if key[0] < newest:
                    cause = errors[0] if errors else "A part of another process is damaged."
                    warnings.warn(f"{cause} Continuing from round {key[0]} instead of {newest}.", stacklevel=2)
                return parts
        if errors:
            raise CadenError(f"No checkpoint can be read: {errors[0]}")
        return None

    def _readable(self) -> Iterator[tuple[tuple[int, int], list[Part] | None, str]]:
        """Yield each generation as this process reads it, or the error if it cannot."""
        rank, world = self._transport.rank, self._transport.world
        for key, files in self.generations().items():
            try:
                wanted = [files[rank]] if key[1] == world else files
                yield key, [load(file) for file in wanted], ""
            except CadenError as error:
                yield key, None, str(error)

    def save(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float], facts: Mapping[str, Any], sync: bool = True
    ) -> None:
        """Add a generation and delete all but the last two."""
        rank, world, index = self._transport.rank, self._transport.world, int(numbers["round"])
        save(self._folder / f"checkpoint.{index}.{rank}of{world}.safetensors", tensors, numbers, facts, sync)
        self._transport.reduce([0], "max")  # all parts are on disk
        if rank == 0:
            kept = {path for files in list(self.generations().values())[:2] for path in files}
            for path in self._folder.glob("checkpoint.*.safetensors"):
                if path not in kept:
                    durable.remove(path)
        self._transport.reduce([0], "max")

    def clear(self) -> None:
        """Delete all checkpoints of a complete run."""
        for path in self._folder.glob("checkpoint.*.safetensors"):
            durable.remove(path)
