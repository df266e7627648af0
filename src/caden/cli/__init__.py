"""The command line: parse, call, print. Exit code 0 is done, 1 a failed run, 2 bad input."""

import os
import sys
import warnings

import typer

from caden._tensor.parallel import keep_freed_memory
from caden.cli import fleet, run, study
from caden.errors import CadenError, RunError
from caden.networks import cluster

app = typer.Typer(
    help="Decentralized optimization: agents on a graph train one model together without a server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (run, study, fleet):
    module.register(app)


def main() -> None:
    """Entry point: errors and warnings are one line each on standard error."""
    warnings.showwarning = lambda message, *rest: print(f"caden: warning: {message}", file=sys.stderr)
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the current folder count
    if os.environ.get("CADEN_MALLOC") != "system":
        keep_freed_memory()
    job = cluster.launched()
    try:
        app()
    except (CadenError, RunError) as error:
        if job is None or job.rank == 0:  # the other ranks have met the same
            print(f"caden: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, CadenError) else 1)
    except (RuntimeError, MemoryError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, MemoryError) or "allocate memory" in line:
            print(f"caden: There is not enough memory: {line.rpartition(': ')[2].partition('. ')[0]}.", file=sys.stderr)
            sys.exit(2)
        if job is None:
            raise
        print(f"caden: rank {job.rank} lost its job: {line}", file=sys.stderr)
        sys.exit(1)
