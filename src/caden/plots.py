"""The picture of a run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

_PANELS = (
    ("accuracy", "mean test accuracy of the local models", False),
    ("objective", "sum of the local losses", True),
    ("relative_error", "relative error: |Σ∇f|² + Σ|xᵢ−xᵢ₊₁|²", True),
    ("consensus", "root mean square distance from the mean", True),
    ("lyapunov", "Lyapunov function V", True),
    ("dual_sum", "norm of the sum of the duals", True),
)


def curves(history: pd.DataFrame, path: Path, target: float | None = None) -> None:
    """Draw the columns that a history has against the rounds, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [p for p in _PANELS if p[0] in history and history[p[0]].notna().any()]
    rows = (len(panels) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(9, 2.7 * rows), layout="constrained", squeeze=False)
    for axis, (column, title, logarithmic) in zip(axes.flat, panels):
        values = history[column]
        axis.plot(history["round"], values, color="#0072b2", linewidth=1.6)
        if logarithmic and (values > 0).any():
            axis.set_yscale("log")
        if column == "accuracy" and target is not None:
            axis.axhline(target, color="#d55e00", linewidth=1, linestyle="--")
            axis.annotate(
                f"target {target:.0%}", (1, target), xycoords=("axes fraction", "data"), ha="right", va="bottom"
            )
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("round")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")
_AXES = (
    ("round", "rounds"),
    ("communications", "vectors sent"),
    ("gradients", "gradient evaluations"),
    ("seconds", "seconds"),
)


def comparison(histories: dict[str, pd.DataFrame], path: Path, target: float | None = None) -> None:
    """Draw several histories against rounds, communications, gradient evaluations and seconds, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    accuracy = all("accuracy" in history for history in histories.values())
    column, title = ("accuracy", "mean accuracy") if accuracy else ("relative_error", "relative error")
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained", sharey=True)
    for axis, (x, label) in zip(axes.flat, _AXES):
        for number, (name, history) in enumerate(histories.items()):
            style = "-" if number < len(_COLOURS) else "--"
            axis.plot(history[x], history[column], style, color=_COLOURS[number % len(_COLOURS)], label=name)
        if accuracy and target is not None:
            axis.axhline(target, color="grey", linewidth=1, linestyle=":")
        if not accuracy:
            axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel(title)
    axes[1, 0].set_ylabel(title)
    axes[0, 0].legend(fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
