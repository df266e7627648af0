"""Networks by name, for files and examples."""

from __future__ import annotations

from torch import nn

from caden.draws import seeded
from caden.errors import require_choice, require_fraction, require_integer
from caden.problems._normalisation import group_norm


def mlp(inputs: int, outputs: int, hidden: int = 128, seed: int = 0) -> nn.Sequential:
    """The paper's network: two fully connected layers without biases and a ReLU between them."""
    require_integer("hidden", hidden, least=1)
    with seeded(seed):
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs, hidden, bias=False),
            nn.ReLU(),
            nn.Linear(hidden, outputs, bias=False),
        )


def cnn(
    channels: int,
    side: int,
    outputs: int,
    hidden: int = 128,
    norm: str = "group",
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Module:
    """Two convolutions of 16 and 32 channels, each normalised and halved in size, and two fully connected layers.

    >>> sum(p.numel() for p in cnn(1, 28, 10).parameters())
    207018
    """
    require_integer("hidden", hidden, least=1), require_choice("norm", norm, ("group", "batch", "none"))
    require_fraction("dropout", dropout, "[0, 1)")
    with seeded(seed):
        layers: list[nn.Module] = []
        for before, after in ((channels, 16), (16, 32)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, hidden), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        layers += [nn.Linear(hidden, outputs)]
    if norm == "none":
        layers = [layer for layer in layers if not isinstance(layer, nn.BatchNorm2d)]
    model = nn.Sequential(*layers)
    return group_norm(model) if norm == "group" else model
