"""Loops over agents, one by one, on threads or in order."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch

_SLICE = 1 << 15  # numbers of a slice: fewer are processed sooner than a thread wakes up


@cache
def _workers(process: int, threads: int) -> ThreadPoolExecutor:
    """Return threads that run torch single-threaded, all of them started and set up."""
    ready = threading.Barrier(threads + 1)

    def prepare() -> None:
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="caden", initializer=prepare)
    for _ in range(threads):
        pool.submit(int)
    ready.wait()
    return pool


def run_in_threads(function: Callable[[int], object], items: Iterable[int]) -> None:
    """Call `function` on every item, on as many threads as torch may use, with one torch thread inside each call.

    The products of one agent are too small to split between cores without loss. A result computed by a single thread
    has the same bits for any number of threads.
    """
    items, threads = list(items), torch.get_num_threads()
    if threads == 1 or len(items) < 2:
        for item in items:
            function(item)
        return
    pool = _workers(os.getpid(), threads - 1)
    queue = deque(items)  # taken from both ends: neighbours in memory go to the same thread

    def work(thread: int) -> None:
        take = queue.pop if thread % 2 else queue.popleft
        while queue:
            try:
                item = take()
            except IndexError:  # another thread took the last item
                return
            try:
                function(item)
            except BaseException:
                queue.clear()  # stops the other threads
                raise

    torch.set_num_threads(1)  # the library for matrix products has one setting for all threads
    try:
        helpers = [pool.submit(work, thread) for thread in range(1, threads)]
        try:
            work(0)
        finally:
            wait(helpers)
    finally:
        torch.set_num_threads(threads)
    for helper in helpers:
        helper.result()


def run_in_slices(function: Callable[..., Any], arguments: tuple[Any, ...], rows: int, size: int) -> Any:
    """Call `function(*arguments, begin, end)` on ranges of rows that are worth a thread; a row has `size` numbers.

    Returns the result if one call did it all.
    """
    threads = min(torch.get_num_threads(), rows, rows * size // _SLICE)
    if threads < 2:
        return function(*arguments, 0, rows)
    ends = [rows * n // threads for n in range(threads + 1)]
    run_in_threads(lambda n: function(*arguments, ends[n], ends[n + 1]), range(threads))
    return None


def run_in_order(function: Callable[[int], object], items: Iterable[int]) -> None:
    """Call `function` on the items in order, with torch's threads inside each call: better if memory is the limit."""
    for item in items:
        function(item)


AGENT_LOOPS = {"loop": run_in_threads, "turns": run_in_order}  # ways to loop over agents one by one
