"""The columns of a history: what each is called, how it is written, how it is drawn. Nobody else says so."""

from typing import NamedTuple


class Column(NamedTuple):
    """A column; `form` is a format of Python's, with "," for counts."""

    label: str
    form: str
    axis: bool = False  # other columns are drawn against it
    measure: bool = False  # it is drawn itself
    log: bool = False  # on a logarithmic axis
    formula: str = ""

    @property
    def title(self) -> str:
        """The label with its formula, for axes."""
        return f"{self.label}: {self.formula}" if self.formula else self.label

    def text(self, value: float | None) -> str:
        """A value as people read it."""
        if value is None:
            return "-"
        # Of vectors there may be parts, such as the few scalars that agents agree on.
        return format(round(value, 2), ",") if self.form == "," else format(value, self.form)


COLUMNS = {
    "round": Column("rounds", ",", axis=True),
    "communications": Column("vectors sent", ",", axis=True),
    "gradients": Column("gradient evaluations", ",", axis=True),
    "seconds": Column("seconds", ".2f", axis=True),
    "bytes": Column("bytes sent", ",", axis=True),
    "accuracy": Column("mean test accuracy", ".2%", measure=True),
    "objective": Column("sum of the local losses", ".6g", measure=True, log=True),
    "relative_error": Column("relative error", ".3e", measure=True, log=True, formula="|Σ∇f|² + Σ|xᵢ−xᵢ₊₁|²"),
    "consensus": Column("root mean square distance from the mean", ".3e", measure=True, log=True),
    "lyapunov": Column("Lyapunov function V", ".3e", measure=True, log=True),
    "dual_sum": Column("norm of the sum of duals", ".3e", measure=True, log=True),
    "mean_lyapunov": Column("running mean of V", ".3e", measure=True, log=True),
    "rejected": Column("rejected trial points", ","),
    "fallbacks": Column("fallback gradient steps", ","),
    "stalled": Column("stalled local solves", ","),
    "active": Column("agents awake", ","),
    "wire_bytes": Column("bytes between processes", ","),
    "mu_z": Column("mu_z", ".4g"),
}
AXES = {name: column.label for name, column in COLUMNS.items() if column.axis}
MEASURES = {name: column for name, column in COLUMNS.items() if column.measure}
EFFORTS = ("round", "communications", "gradients", "seconds")  # what reaching a target may be counted in


def to_target(column: str) -> str:
    """The entry of a summary that says what the target took."""
    return f"{'rounds' if column == 'round' else column}_to_target"
