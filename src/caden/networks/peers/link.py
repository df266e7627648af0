"""The links between peers, on Zenoh. They exist along the graph's edges only.

Every peer repeatedly pushes small notices: its newest version, its progress, and what it knows of every agent's state.
A lost notice does not matter. Rows are pulled: a peer that needs one asks its owner, who keeps the last few (`offers`).
So no sender waits for a receiver, a slow receiver skips versions, and a silent one costs no memory. A free-running peer
fetches a row when it has read the last one. A reply is checked (sender, version, size, dtype, checksum, finite numbers)
before it is used. Invalid messages are dropped and counted.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden.errors import CadenError, Interrupted, RunError
from caden.graphs import Graph
from caden.networks.codec import Codec
from caden.networks.peers.fleet import Fleet
from caden.networks.peers.offers import Offers, apply_difference
from caden.networks.peers.session import key, zenoh_config
from caden.networks.peers.transports import HEADER, KEPT_ROUNDS, LANES, Path, Received
from caden.networks.peers.wire import (
    AGREED,
    CHUNK,
    DTYPES,
    FINISHED,
    LAST,
    LIFE,
    LIVES,
    Entry,
    Refused,
    checksum,
    pack_note,
    pack_row,
    read_row_header,
    unpack_note,
)

WINDOW = 4  # replies requested at the same time
BEAT = 0.2  # seconds between two notices
ASK = 2.0  # seconds a reply may take


def _bytes(row: Tensor) -> memoryview:
    """Return the memory of a row, for reading or writing."""
    array: Any = row.numpy()
    return memoryview(array).cast("B")


class _Fetched(NamedTuple):
    """What a neighbour replied: its newest row, by itself or as a difference to version `base`; None: nothing newer."""

    version: int
    base: int
    row: Tensor | None


class ZenohLink:
    """A peer's connection to its neighbours over Zenoh."""

    def __init__(
        self,
        fleet: Fleet,
        graph: Graph,
        agent: int,
        like: Tensor,
        home: FilePath = FilePath(),
        folder: FilePath | None = None,
        stop: threading.Event | None = None,
        codec: Codec | None = None,
    ):
        try:
            import zenoh
        except ImportError:
            raise CadenError('Peers need the extra "peers": pip install "caden-opt[peers]".') from None
        if like.dtype not in DTYPES or like.device.type != "cpu":
            raise CadenError(f"Peers need float32 or float64 on the CPU, got {like.dtype} on {like.device.type}.")
        self._fleet, self._graph, self._agent, self._like = fleet, graph, agent, like
        self._folder, self._stop = folder, stop or threading.Event()
        self.neighbours = graph.neighbours(agent)
        self._free = fleet.mode == "free"
        self._changed = threading.Condition()
        self._announcing = threading.Lock()  # keeps notices in the order in which they were made
        self._codec, self._dim = codec if self._free else None, like.numel() - (HEADER if self._free else 0)
        self._offers = Offers(self._free, self._codec, self._dim)
        self._newest_rows: dict[int, tuple[int, Tensor]] = {}  # neighbour -> its newest version and row
        self._unread: set[int] = set()  # neighbours whose newest row was not read yet: no other is fetched until then
        self._paths: dict[int, Path] = {j: [] for j in self.neighbours}  # ... and how it came about
        self._announced = dict.fromkeys(self.neighbours, -1)  # newest version that each has announced
        self._rounds_done = dict.fromkeys(self.neighbours, -1)  # rounds that each has done; -1: not started
        self._notice_times = dict.fromkeys(self.neighbours, -1.0)  # when the last notice of each came
        self._row_times = dict.fromkeys(self.neighbours, -1.0)  # when the last row of each came
        self.table = [Entry()] * graph.agents
        self._claimed = -1  # newest version of this agent that a neighbour knows of
        self.refused: Counter[tuple[int, str]] = Counter()  # by neighbour and reason
        self.wire_bytes, self.rounds, self.slowest = 0, -1, 0.0
        self._rows_received, self._rows_seen, self._closing = 0, 0, threading.Event()
        self._began = time.monotonic()
        self._progress_times = [self._began] * graph.agents  # when each agent last made progress, as seen here
        self._members_before: set[int] = set()  # neighbours that counted before this peer restarted
        self._zenoh: Any = zenoh
        try:
            self._session: Any = zenoh.open(zenoh_config(zenoh, fleet, agent, self.neighbours, home))
        except zenoh.ZError as error:
            raise CadenError(f"Agent {agent} cannot listen on {fleet.endpoints[agent]}: {error}.") from None
        self._publisher = self._session.declare_publisher(
            self._key("note", agent),
            congestion_control=zenoh.CongestionControl.DROP,
            priority=zenoh.Priority.REAL_TIME,
            express=True,
        )
        self._declarations: list[Any] = []  # subscribers and queryables live as long as they are referenced
        self._threads = [threading.Thread(target=self._announce_repeatedly, daemon=True)]
        for j in self.neighbours:
            queries: queue.Queue[Any] = queue.Queue(4 * WINDOW)  # one per neighbour: a slow one delays only itself
            self._threads.append(threading.Thread(target=self._answer_queries, args=(j, queries), daemon=True))
            if self._free:
                self._threads.append(threading.Thread(target=self._fetch_newest_rows, args=(j,), daemon=True))
            on_query, on_notice = partial(self._enqueue_query, queries), partial(self._receive_notice, j)
            self._declarations.append(self._session.declare_queryable(self._key("row", agent, j), on_query))
            self._declarations.append(self._session.declare_subscriber(self._key("note", j), on_notice))
        for thread in self._threads:
            thread.start()

    def _key(self, *parts: object) -> str:
        return key(self._fleet, *parts)

    # Incoming messages.

    def _refuse(self, neighbour: int, why: object) -> None:
        """Count a refused message, and log the first of each kind."""
        self.refused[neighbour, str(why)] += 1
        if self._folder is not None and self.refused[neighbour, str(why)] == 1 and len(self.refused) < 100:
            with (self._folder / "refused.log").open("a") as file:
                file.write(f"{time.time():.3f} agent {neighbour}: {why}\n")

    def _receive_notice(self, neighbour: int, sample: Any) -> None:
        try:
            newest, rounds, table = unpack_note(bytes(sample.payload), neighbour, self._graph.agents)
        except Refused as why:
            self._refuse(neighbour, why)
            return
        with self._changed:
            if newest < self._announced[neighbour]:
                self._refuse(neighbour, "an old version (replayed, or it was restarted)")
            self._notice_times[neighbour] = time.monotonic()
            self._announced[neighbour] = max(newest, self._announced[neighbour])
            self._rounds_done[neighbour] = max(rounds, self._rounds_done[neighbour])
            self._merge(table)
            self._changed.notify_all()

    def _merge(self, table: list[Entry]) -> None:
        now = time.monotonic()
        for agent, (known, received) in enumerate(zip(self.table, table)):
            if agent == self._agent:  # its own entry is always the newest, unless this agent has lost steps
                self._claimed = max(self._claimed, received.version)
            else:
                self.table[agent] = known.merge(received)
                if received.version > known.version:
                    self._progress_times[agent] = now

    def _fetch(self, neighbour: int, version: int, like: Tensor, base: int = -1) -> _Fetched | None:
        """Fetch a row of the neighbour, or for version -1 what is newer than `base`; None if it is not available now.

        The first reply says how many pieces there are; it may be a difference to `base`, or say that nothing is newer.
        """
        whole = like.numel() * like.element_size()
        sizes = {like.dtype: whole}
        data, wanted, asks_for_newest = bytearray(), whole if version >= 0 else 1, version < 0
        if asks_for_newest and base >= 0 and self._codec is not None:
            difference = self._codec.size(self._dim, like.element_size())
            sizes |= {torch.uint8: difference + (like.numel() - self._dim) * like.element_size()}
        waiting: deque[tuple[int, Any]] = deque()
        offsets, its_base = deque(range(0, wanted, CHUNK)), -1
        try:
            while offsets or waiting:
                while offsets and len(waiting) < (WINDOW if version >= 0 else 1):
                    offset = offsets.popleft()
                    selector = f"{self._key('row', neighbour, self._agent)}?v={version};o={offset};b={base}"
                    waiting.append((offset, self._session.get(selector, timeout=ASK)))
                offset, replies = waiting.popleft()
                reply = next((r.ok for r in replies if r.ok is not None), None)
                if reply is None:
                    return None
                header = b"" if reply.attachment is None else bytes(reply.attachment)
                if asks_for_newest and base >= 0 and len(reply.payload) == 0:
                    sizes = {torch.uint8: 0}
                piece_header = read_row_header(header, neighbour, sizes, offset, len(reply.payload))
                received, piece_base, total, digest = piece_header
                if (version >= 0 and received != version) or received < 0 or piece_base not in (-1, base):
                    raise Refused("a row of another version")
                if (piece_base >= 0) != (total != whole):
                    raise Refused("a row of another type or dimension")
                if asks_for_newest:  # the first piece
                    asks_for_newest, version, base, its_base = False, received, piece_base, piece_base
                    offsets = deque(range(CHUNK, total, CHUNK))
                    sizes = {dtype: size for dtype, size in sizes.items() if size == total}
                piece = bytes(reply.payload)
                if checksum(piece) != digest:
                    raise Refused("a damaged row")
                data += piece
            return self._decoded(neighbour, version, its_base, data, like)
        except (Refused, RunError) as why:
            self._refuse(neighbour, why)
        except self._zenoh.ZError:
            pass
        return None

    def _decoded(self, neighbour: int, version: int, base: int, data: bytearray, like: Tensor) -> _Fetched:
        """Return the row that was fetched in pieces; without a row if nothing is newer."""
        if base >= 0 and not data:
            return _Fetched(version, base, None)
        if base < 0:
            row = torch.frombuffer(data, dtype=like.dtype).clone()
        elif self._codec is None:
            raise Refused("a difference that was not asked for")
        else:
            copy = self._newest_rows[neighbour][1]
            row = apply_difference(copy, torch.frombuffer(data, dtype=torch.uint8), self._codec, self._dim)
        if row.shape != like.shape or not bool(row.isfinite().all()):
            raise Refused("a row with non-finite numbers")
        return _Fetched(version, base, row)

    def _fetch_newest_rows(self, neighbour: int) -> None:
        """Fetch the newest row of a neighbour whenever it announces one."""
        asked = -1  # the announcement that was last followed
        while not self._closing.is_set():
            with self._changed:
                latest = self._newest_rows[neighbour][0] if neighbour in self._newest_rows else -1
                announced = self._announced[neighbour]
                if announced <= max(latest, asked) or neighbour in self._unread:
                    self._changed.wait(BEAT)
                    continue
            fetched = self._fetch(neighbour, -1, self._like, latest)
            if fetched is not None and fetched.row is None:
                asked = announced
            if fetched is None or fetched.row is None or fetched.version <= latest:
                self._closing.wait(0.05)
                continue
            with self._changed:
                self._newest_rows[neighbour] = (fetched.version, fetched.row)
                self._unread.add(neighbour)
                if self._codec is not None:
                    before = self._paths[neighbour] if fetched.base >= 0 else []  # a whole row needs nothing before it
                    self._paths[neighbour] = [*before, (fetched.version, fetched.base)]
                self._row_times[neighbour] = time.monotonic()
                self._rows_received += 1
                self._changed.notify_all()

    # Outgoing messages.

    def _enqueue_query(self, queries: queue.Queue[Any], query: Any) -> None:
        with suppress(queue.Full):  # the neighbour asks again
            queries.put_nowait(query)

    def _answer_queries(self, neighbour: int, queries: queue.Queue[Any]) -> None:
        while not self._closing.is_set():
            try:
                query = queries.get(timeout=BEAT)
            except queue.Empty:
                continue
            try:
                parameters = dict(part.split("=") for part in str(query.parameters).split(";"))
                version, offset, base = (int(parameters[name]) for name in "vob")
                if not -1 <= base < LIVES * LIFE:
                    raise ValueError
            except (KeyError, ValueError):
                self._refuse(neighbour, "a malformed query")
                continue
            with self._changed:
                offer = self._offers.answer(neighbour, version, base, offset)
            data = memoryview(b"") if offer is None or not offer.data.numel() else _bytes(offer.data)
            if offer is None or not 0 <= offset <= max(len(data) - 1, 0):
                query.drop()
                continue
            piece = bytes(data[offset : offset + CHUNK])
            header = pack_row(self._agent, offer.version, offer.base, offer.data.dtype, len(data), offset, piece)
            with self._changed:
                self.wire_bytes += len(piece) + len(header)
            with suppress(self._zenoh.ZError):
                query.reply(query.key_expr, piece, attachment=header)
            query.drop()

    def _announce(self) -> None:
        with self._announcing:
            with self._changed:
                note = pack_note(self._agent, self._offers.newest, self.rounds, self.table)
                self.wire_bytes += len(note) * len(self.neighbours)
            with suppress(self._zenoh.ZError):
                self._publisher.put(note)

    def _announce_repeatedly(self) -> None:
        while not self._closing.wait(BEAT):
            self._announce()

    def publish(self, version: int, rows: Mapping[int, Tensor]) -> None:
        began = time.monotonic()
        with self._changed:
            self._offers.add(version, rows)
        self._announce()
        self.slowest = max(self.slowest, time.monotonic() - began)

    def buffers(self) -> dict[str, Tensor]:
        """Return what a restarted peer must know and be able to send again."""
        with self._changed:
            return {"table": torch.tensor([list(entry) for entry in self.table])} | self._offers.buffers()

    def restore(self, buffers: dict[str, Tensor], members: set[int]) -> None:
        """Restore what `buffers` returned; `members` count until they have been silent for too long."""
        with self._changed:
            self._members_before = members
            self._merge([Entry(*entry) for entry in buffers.pop("table").tolist()])
            self._offers.restore(buffers)

    # The interface that a peer uses.

    def report_progress(self, rounds: int, life: int = 0, calm: int = 0, flags: int = 0) -> None:
        """Report this agent's progress to the others."""
        with self._changed:
            self.rounds, self.table[self._agent] = rounds, Entry(life * LIFE + rounds, calm, flags)
        if flags:
            self._announce()

    def life(self, step: int, own: int) -> int:
        with self._changed:
            return min(self._claimed // LIFE + 1, LIVES - 1) if self._claimed > own * LIFE + step else own

    def await_word(self, neighbours: Iterable[int], seconds: float) -> None:
        """Wait until a notice has come from each of the neighbours, at most for so long."""
        wanted = set(neighbours)
        with self._changed:
            self._changed.wait_for(
                lambda: self._stop.is_set() or all(self._notice_times[j] >= 0 for j in wanted), seconds
            )

    def wait(self, neighbour: int, version: int, like: Tensor) -> Tensor:
        def announced() -> bool:
            return self._announced[neighbour] >= version

        began = last_missing = time.monotonic()
        while True:
            with self._changed:
                ready = self._changed.wait_for(announced, BEAT)
            if ready:
                fetched = self._fetch(neighbour, version, like)
                if fetched is not None and fetched.row is not None:
                    return fetched.row
                behind = self._announced[neighbour] // LANES - version // LANES
                if behind > KEPT_ROUNDS:
                    raise RunError(
                        f"Agent {neighbour} is {behind} rounds ahead, so agent {self._agent} has lost its directory: a "
                        "fleet in lockstep cannot continue without it and must start again."
                    )
                if time.monotonic() - last_missing > self._fleet.patience:
                    raise RunError(f"Agent {neighbour} offers version {version}, but it cannot be fetched.")
                self._closing.wait(0.02)
            else:
                last_missing = time.monotonic()
            self._check_alive(neighbour, began)

    def wait_for_slower_neighbours(self, round: int) -> None:
        """Wait until no neighbour is more than one round behind, because older rows are not kept."""
        began = time.monotonic()
        for j in self.neighbours:
            while self._rounds_done[j] < round - 1:
                with self._changed:
                    self._changed.wait(BEAT)
                self._check_alive(j, began)

    def _check_alive(self, neighbour: int, began: float) -> None:
        """Raise if this peer is told to stop, or if the neighbour has been silent for longer than `patience`."""
        if self._stop.is_set() or self._closing.is_set():
            raise Interrupted(f"Agent {self._agent} stopped while waiting; run the same command to continue.")
        silent = time.monotonic() - max(began, self._notice_times[neighbour])
        if silent > self._fleet.patience:
            raise RunError(f"Agent {neighbour} has been silent for {silent:.0f} s; run the same command to continue.")

    def await_start(self) -> None:
        """Free-running peers only: wait a short time for the neighbours to start; none is required."""

        def ready() -> bool:
            return len(self._newest_rows) == len(self.neighbours) or self._stop.is_set()

        with self._changed:
            self._changed.wait_for(ready, min(10.0, self._fleet.forget))

    def wait_for_rows(self, timeout: float) -> None:
        """Wait until a new row has arrived from any neighbour, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows_received > self._rows_seen or self._closing.is_set(), timeout)
            self._rows_seen = self._rows_received

    def silent(self, neighbour: int) -> float:
        """Return the seconds since a neighbour was last heard; infinite if it never was."""
        heard = max(self._notice_times[neighbour], self._began if neighbour in self._members_before else -1.0)
        return time.monotonic() - heard if heard >= 0 else float("inf")

    def never_heard(self) -> list[int]:
        """Return the neighbours from which nothing has come, in this process or before it was restarted.

        Those that others knew, but that have made no progress for `forget` seconds, have left and are not missing.
        """
        long_ago = time.monotonic() - self._fleet.forget
        left = {j for j in self.neighbours if self.table[j].version >= 0 and self._progress_times[j] < long_ago}
        return [j for j in self.neighbours if math.isinf(self.silent(j)) and j not in left]

    def refusal(self, neighbour: int) -> str:
        """Return why messages of a neighbour were refused, or ""."""
        return next((f"refused {why}" for j, why in list(self.refused) if j == neighbour), "")

    def members(self, step: int) -> set[int]:
        with self._changed:
            known = {*self._newest_rows, *self._members_before}
            return {j for j in known if self.silent(j) < self._fleet.forget or j in self.finished()}

    def finished(self) -> set[int]:
        """Return the agents that have finished."""
        return {agent for agent, entry in enumerate(self.table) if entry.flags & FINISHED}

    def read(self, step: int) -> dict[int, Received]:
        if step < 0:
            self.await_start()
        with self._changed:
            received = {j: Received(*newest, self._paths[j]) for j, newest in self._newest_rows.items()}
            self._paths = {j: [] for j in self.neighbours}
            self._unread.clear()
            self._changed.notify_all()
            return received

    def stale(self) -> float:
        """Return the age in seconds of the oldest row among the neighbours' newest ones."""
        now = time.monotonic()
        return max((now - max(arrived, self._began) for arrived in self._row_times.values()), default=0.0)

    def agreed(self, calm: int) -> bool:
        """Whether all agents present have been calm for long enough, or one of them has already found that.

        Agents that have made no progress for a long time, as far as this peer knows, are no longer waited for. What
        others claim never ends an agent that is not calm itself.
        """
        oldest = time.monotonic() - self._fleet.forget - 2 * BEAT * self._graph.diameter
        with self._changed:
            if self.table[self._agent].calm < calm:
                return False
            if any(entry.flags & AGREED for entry in self.table):
                return True
            silent = [self._progress_times[k] < oldest and k != self._agent for k in range(len(self.table))]
            return all(e.calm >= calm or e.flags & FINISHED or gone for e, gone in zip(self.table, silent))

    def mean_of_last_rows(self, row: Tensor, end: float) -> Tensor:
        """Free-running peers only: return the mean of the last rows of this agent and of all that finish by `end`.

        Rows pass from neighbour to neighbour. Agents that have made no progress for `forget` seconds are not waited
        for, unless they are neighbours that still answer; one that was never heard of may be starting until then. Rows
        with another end than `row`, the mark of a model, do not count.
        """
        with self._changed:
            self._offers.last_rows[self._agent] = row
        missing = {self._agent}
        while missing and time.monotonic() < end and not self._stop.is_set():
            for k in [k for k in self.finished() if k not in self._offers.last_rows]:
                self._fetch_last_row(k)
            recently = time.monotonic() - self._fleet.forget
            with self._changed:
                answering = {
                    j for j in self.neighbours if self._notice_times[j] > recently and self.table[j].version >= 0
                }
                moving = {k for k, moment in enumerate(self._progress_times) if moment > recently}
                missing = (answering | moving) - {*self._offers.last_rows}
                if missing:
                    self._changed.wait(BEAT)
        rows = [last for _, last in sorted(self._offers.last_rows.items()) if last[-1] == row[-1]]
        return torch.stack(rows).mean(0)

    def _fetch_last_row(self, agent: int) -> None:
        """Ask the agent itself for its last row, if it is a neighbour, or those that may have it."""
        finished = self.finished()
        for j in sorted(self.neighbours, key=lambda j: j != agent):
            if j in finished and self.silent(j) < ASK:
                fetched = self._fetch(j, LAST + agent, self._like)
                if fetched is not None and fetched.row is not None:
                    with self._changed:
                        self._offers.last_rows[agent] = fetched.row
                    return

    def linger(self, stop: threading.Event, end: float, flag: int) -> None:
        """Stay while a neighbour that is present lacks the flag: it may still need this peer."""
        while time.monotonic() < end and not stop.is_set():
            with self._changed:
                needed = [
                    j
                    for j in self.neighbours
                    if not self.table[j].flags & flag and self.silent(j) < min(self._fleet.forget, 10.0)
                ]
            if not needed:
                break
            stop.wait(BEAT)
        stop.wait(2 * BEAT)  # so that the last notice is heard

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(ASK + 1)
        self._session.close()
