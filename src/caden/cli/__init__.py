"""The command line: parse, call, print. Exit code 0 means done, 1 a failed run, 2 bad input.

A command imports what it needs when it is called, so help and usage errors do not wait for torch.
"""

import os
import sys
import warnings
from typing import Annotated, NoReturn

import typer

from caden._tensor.memory import keep_freed_memory
from caden._version import __version__
from caden.cli import arena, fleet, run, study, timing
from caden.errors import CadenError, RunError
from caden.launcher import launched, watch

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)  # plain help is faster


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"caden {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Decentralized optimization: agents on a graph train one model together without a server."""


for module in (run, study, arena, timing, fleet):
    module.register(app)


def main() -> None:
    """Run the command line; errors and warnings are one line each on standard error."""
    warnings.showwarning = lambda message, *rest: print(f"caden: warning: {message}", file=sys.stderr)
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the current directory can be named in a file
    keep_freed_memory()
    watch()
    try:
        _exit(app(prog_name="caden", standalone_mode=False) or 0)
    except (CadenError, RunError) as error:
        _end(str(error), 2 if isinstance(error, CadenError) else 1)
    except OSError as error:
        _end(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.", 1)
    except (RuntimeError, MemoryError) as error:
        _end_unexpected(error)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what the parser refuses has one
            raise
        _refuse_usage(error)


def _exit(code: int) -> NoReturn:
    """End the process; a rank of a job immediately, since torch.distributed threads can abort an orderly exit."""
    if launched() is not None:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _end(message: str, code: int) -> NoReturn:
    """Print one line, in the first process of a job only: the others hit the same error."""
    job = launched()
    if job is None or job.rank == 0:
        print(f"caden: {' '.join(message.splitlines())}", file=sys.stderr)
    _exit(code)


def _refuse_usage(error: Exception) -> NoReturn:
    """Print what the parser says about the arguments, or the help if there are none."""
    message: str = error.format_message()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
        sys.exit(2)
    command = context.command_path if context is not None else "caden"
    print(f"caden: {' '.join(message.split()).rstrip('.')}. Run `{command} --help` for help.", file=sys.stderr)
    sys.exit(2)


def _end_unexpected(error: RuntimeError | MemoryError) -> NoReturn:
    """Explain a lack of memory or a lost job in one line; everything else is a bug and keeps its traceback."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, MemoryError) or "allocate memory" in line:
        print(f"caden: There is not enough memory: {line.rpartition(': ')[2].partition('. ')[0]}.", file=sys.stderr)
        sys.exit(2)
    job = launched()
    if job is None:
        raise error
    print(f"caden: rank {job.rank} lost its job: {line}", file=sys.stderr)
    _exit(1)
