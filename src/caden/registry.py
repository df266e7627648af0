"""Objects built from tables `{name = "...", parameter = value, ...}`, from TOML files or keyword arguments."""

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from caden.errors import CadenError, require_choice

Factory = Callable[..., Any]


class Gate(Protocol):
    """Who decides about code outside caden."""

    def load(self, name: str) -> None:
        """Called before an object is loaded by name; may raise."""

    def built(self) -> None:
        """Called when everything that a file names was built."""


_gate: ContextVar[Gate | None] = ContextVar("gate", default=None)


@contextmanager
def code_gate(gate: Gate) -> Iterator[None]:
    """Within this context, `gate` decides about code outside caden."""
    token = _gate.set(gate)
    try:
        yield
    finally:
        _gate.reset(token)


def everything_built() -> None:
    """Tell the gate, if there is one."""
    gate = _gate.get()
    if gate is not None:
        gate.built()


def load_object(name: str) -> Any:
    """Load the object at "module:name" or "path/to/file.py:name"; the only place that runs code named in a file."""
    source, _, attribute = name.rpartition(":")
    gate = _gate.get()
    if gate is not None and source.partition(".")[0] != "caden":
        gate.load(name)
    try:
        if not source.endswith(".py"):
            return getattr(importlib.import_module(source), attribute)
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        if spec is None or spec.loader is None:
            raise ImportError(f"{source} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, attribute)
    except CadenError:
        raise
    except Exception as error:  # of code outside caden
        kind = "" if isinstance(error, ImportError | AttributeError | OSError) else f"{type(error).__name__}: "
        raise CadenError(f"Cannot load {name!r}: {kind}{str(error).splitlines()[0] if str(error) else ''}.") from None


def factory(
    kind: str, registry: Mapping[str, Factory], table: Mapping[str, Any], hidden: tuple[str, ...] = ()
) -> Factory:
    """Return the function that a table names, after checking that it accepts all keys of the table."""
    name = table.get("name")
    if not isinstance(name, str):
        raise CadenError(f"`{kind}.name` is missing; known: {', '.join(sorted(registry))}.")
    function: Factory = load_object(name) if ":" in name else registry[require_choice(kind, name, registry)]
    if not callable(function):
        raise CadenError(f"{name!r} is not a function that makes a {kind}.")
    known = [key for key in parameters(function) if key not in hidden]
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters(function).values())
    for key in table:
        if key != "name" and not accepts_any:
            require_choice("key", f"{kind}.{key}", [f"{kind}.{k}" for k in known])
    return function


def parameters(function: Factory) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a function, or none if they cannot be determined."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def make(kind: str, registry: Mapping[str, Factory], table: Mapping[str, Any], **shared: Any) -> Any:
    """Call the function a table names with the table's values and the shared values it accepts and the table lacks."""
    function = factory(kind, registry, table)
    known = parameters(function)
    arguments = {k: v for k, v in shared.items() if k in known} | {k: v for k, v in table.items() if k != "name"}
    missing = [
        n for n, p in known.items() if p.default is p.empty and n not in arguments and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    if missing:
        raise CadenError(f"`{kind}.{missing[0]}` is missing: {table['name']} needs it.")
    try:
        return function(**arguments)
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        raise CadenError(f"`{kind}`: {str(error).rpartition('.')[2]}.") from None
