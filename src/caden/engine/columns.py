"""The columns of a history: the label, number format and axis of each, in one place."""

from typing import NamedTuple


class Column(NamedTuple):
    """A column; `form` is a Python format, with "," for counts."""

    label: str
    form: str
    axis: bool = False  # it can be the horizontal axis
    measure: bool = False  # it is drawn as a curve
    log: bool = False  # on a logarithmic axis
    formula: str = ""

    @property
    def title(self) -> str:
        """The label with its formula, for titles."""
        return f"{self.label}: {self.formula}" if self.formula else self.label

    def text(self, value: float | None) -> str:
        """Format a value for people."""
        return "-" if value is None else format(value, self.form)


COLUMNS = {
    "round": Column("rounds", ",", axis=True),
    "communications": Column("communications", ",", axis=True),
    "gradients": Column("gradient evaluations", ",", axis=True),
    "seconds": Column("seconds", ".2f", axis=True),
    "time": Column("simulated seconds", ",.1f", axis=True),
    "bytes": Column("bytes sent", ",", axis=True),
    "accuracy": Column("mean test accuracy", ".2%", measure=True),
    "validation_loss": Column("mean test loss, nats per token", ".4f", measure=True),
    "objective": Column("sum of the local losses", ".6g", measure=True, log=True),
    "batch_loss": Column("mean loss of the batches seen", ".6g", measure=True, log=True),
    "relative_error": Column("relative error", ".3e", measure=True, log=True, formula="|Σ∇fᵢ|² + Σ|xᵢ−xᵢ₊₁|²"),
    "consensus": Column("distance from consensus", ".3e", measure=True, log=True),
    "lyapunov": Column("Lyapunov function V", ".3e", measure=True, log=True),
    "dual_sum": Column("norm of the dual sum", ".3e", measure=True, log=True),
    "mean_lyapunov": Column("running mean of V", ".3e", measure=True, log=True),
    "rejected": Column("rejected trial points", ","),
    "fallbacks": Column("fallback gradient steps", ","),
    "stalled": Column("stalled local solves", ","),
    "active": Column("agents awake", ","),
    "local_steps": Column("local steps, mean", ".1f"),
    "local_steps_least": Column("local steps, least", ".0f"),
    "local_steps_most": Column("local steps, most", ".0f"),
    "idle": Column("idle share of the time, mean", ".1%"),
    "idle_most": Column("idle share of the time, most", ".1%"),
    "participation": Column("rounds taken part in, mean", ".1%"),
    "participation_least": Column("rounds taken part in, least", ".1%"),
    "wire_bytes": Column("bytes sent between processes", ","),
    "test_samples": Column("test samples measured", ","),
    "read_seconds": Column("seconds waiting for data", ".2f"),
    "mu_z": Column("mu_z", ".4g"),
    "outside": Column("conditions that the method does not survive", ","),
}
AXES = {name: column.label for name, column in COLUMNS.items() if column.axis}
MEASURES = {name: column for name, column in COLUMNS.items() if column.measure}
RESERVED = COLUMNS.keys() - {"accuracy", "validation_loss"}  # no metric of a problem may be named so
EFFORTS = ("round", "communications", "gradients", "seconds", "time")  # costs of reaching a target


def to_target(column: str) -> str:
    """Return the summary entry with the cost of reaching the target."""
    return f"{'rounds' if column == 'round' else column}_to_target"
