"""Saving and restoring a run's state: safetensors files, written atomically and verified when read."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from caden.errors import CadenError
from caden.networks.transport import Transport


def _digest(tensors: dict[str, Tensor], numbers: str) -> str:
    total = hashlib.blake2b(numbers.encode(), digest_size=16)
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; a reader sees the old file or the new one, never a part."""
    scratch = path.with_suffix(".tmp")
    save_file(_storable(tensors), scratch, metadata=metadata)
    os.replace(scratch, path)


def save(path: Path, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
    """Write tensors and counters, with a digest."""
    text, tensors = json.dumps(numbers), _storable(tensors)
    # One entry: the order of several in the file would be arbitrary, and equal runs must end in equal bytes.
    write_tensors(path, tensors, {"caden": json.dumps({"numbers": text, "digest": _digest(tensors, text)})})


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Read what `save` wrote, or raise an error if the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["caden"])
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        if _digest(tensors, metadata["numbers"]) != metadata["digest"]:
            raise KeyError("digest")
        return tensors, json.loads(metadata["numbers"])
    except (SafetensorError, KeyError, OSError, ValueError) as error:
        raise CadenError(
            f"The checkpoint {path} is damaged ({error}); delete it to start that run from round 0."
        ) from None


class Checkpoints:
    """The checkpoints of a run directory: one file, or one per process, valid once all are written."""

    def __init__(self, folder: Path, transport: Transport):
        self._folder, self._transport = folder, transport

    def load(self) -> tuple[dict[str, Tensor], dict[str, float]] | None:
        """Return the newest checkpoint, if there is one."""
        folder, world = self._folder, self._transport.world
        pointer, whole = folder / "checkpoint.json", folder / "checkpoint.safetensors"
        last = json.loads(pointer.read_text()) if pointer.exists() else {"processes": 1}
        if last["processes"] != world and (pointer.exists() or whole.exists()):
            raise CadenError(
                f"{folder} was checkpointed by {last['processes']} processes and cannot be resumed by {world}."
            )
        if world == 1:
            return load(whole) if whole.exists() else None
        return load(folder / self._part(last["round"])) if pointer.exists() else None

    def save(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        """Replace the last checkpoint."""
        folder, transport = self._folder, self._transport
        if transport.world == 1:
            save(folder / "checkpoint.safetensors", tensors, numbers)
            return
        name = self._part(int(numbers["round"]))
        save(folder / name, tensors, numbers)
        transport.reduce([0], "max")  # all parts are written
        if transport.rank == 0:
            scratch = folder / "checkpoint.json.tmp"
            scratch.write_text(json.dumps({"round": int(numbers["round"]), "processes": transport.world}))
            os.replace(scratch, folder / "checkpoint.json")
        transport.reduce([0], "max")  # the new parts are valid now
        for old in folder.glob(self._part("*")):
            if old.name != name:
                old.unlink()

    def _part(self, index: int | str) -> str:
        return f"checkpoint.{index}.{self._transport.rank}of{self._transport.world}.safetensors"
