"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[
    Path | None, typer.Argument(metavar="EXPERIMENT.toml", help="Experiment file; by default the built-in one.")
]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value in the file.")]
NoCode = Annotated[bool, typer.Option("--no-code", help="Refuse a file that names code outside caden.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
