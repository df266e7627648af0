"""Functions as plain lists of tensor operations.

`torch.func` derives a gradient and batches it anew in every call. For small tensors that takes longer than the
operations it leads to, which are the same every time. A trace records them once, for tensors of one shape. Running it
gives the same bits.
"""

from collections.abc import Callable
from typing import Any

from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree

_CALLS = 10  # before a function is traced: a trace takes as long as some hundred calls
_SHAPES = 4  # that are traced, at most: mini-batches of whoever is awake have many
_RESHAPES = ("aten::expand", "aten::view", "aten::_unsafe_view")


class Traced:
    """A function of tensors, recorded for arguments of a shape once it was called with them a few times."""

    def __init__(self, function: Callable[..., Any]):
        self._function, self._calls, self._traces = function, dict[Any, int](), dict[Any, Callable[..., Any]]()

    def __call__(self, *arguments: Any) -> Any:
        shapes = tuple((t.shape, t.dtype) for t in _pytree.tree_leaves(arguments))
        if shapes not in self._traces:
            self._calls[shapes] = self._calls.get(shapes, 0) + 1
            if self._calls[shapes] <= _CALLS or len(self._traces) == _SHAPES:
                return self._function(*arguments)
            self._traces[shapes] = _trace(self._function, arguments)
        return self._traces[shapes](*arguments)


def _trace(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the operations of a function, or the function itself if they cannot be recorded."""

    def plain(*given: Any) -> Any:  # tracing takes no bound methods
        return function(*given)

    try:
        trace = make_fx(plain)(*arguments)
    except Exception:  # whatever a user's model does that tracing does not support
        return function
    for node in trace.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "name", str)().split(".")[0] in _RESHAPES:
            source = node.args[0]
            if source.meta["val"].shape == node.meta["val"].shape:
                node.replace_all_uses_with(source)
    trace.graph.eliminate_dead_code()
    trace.recompile()
    return trace
