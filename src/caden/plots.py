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
