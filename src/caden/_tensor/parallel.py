"""Going through agents one by one, on threads or in turn, and memory that is freed and needed again."""

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


@cache
def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks instead of handing them back to the system at once; True if it listens.

    A round makes and drops dozens of tensors of k x d numbers. Returned and fetched again each time, page by page, they
    cost a visible part of the round. CADEN_MALLOC=system leaves the allocator alone.
    """
    if os.environ.get("CADEN_MALLOC") == "system":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


@cache
def _workers(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that run torch single-threaded; all of them are started and set up before this returns."""
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

    Products of one agent are too small to share between cores without loss, and a result computed by a single thread
    has the same bits whatever the number of workers.
    """
    items, threads = list(items), torch.get_num_threads()
    if threads == 1 or len(items) < 2:
        for item in items:
            function(item)
        return
    pool = _workers(os.getpid(), threads - 1)
    left = deque(items)  # taken from both ends: neighbours in memory go to one thread

    def work(thread: int) -> None:
        take = left.pop if thread % 2 else left.popleft
        while left:
            try:
                item = take()
            except IndexError:  # another was faster
                return
            try:
                function(item)
            except BaseException:
                left.clear()  # nobody goes on
                raise

    torch.set_num_threads(1)  # the product library has one setting for all threads
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


def run_in_order(function: Callable[[int], object], items: Iterable[int]) -> None:
    """The same one after the other, with torch's threads inside each call: better where memory is what limits."""
    for item in items:
        function(item)


AGENT_LOOPS = {"loop": run_in_threads, "turns": run_in_order}  # ways to go through agents one by one
