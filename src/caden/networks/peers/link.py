"""The wire between peers, on Zenoh. Links exist along the graph's edges only.

Every peer pushes small notices (its newest version, how far it is, what it knows of everybody's state), again and
again, so that one that is lost does not matter. Rows are pulled: whoever wants one asks its owner, who keeps the last
few. So nobody ever waits for a receiver, a slow one skips versions, and a silent one costs no memory. A reply is
checked (sender, version, size, dtype, checksum, finite numbers) before it is taken; whatever does not fit is dropped
and counted.
"""

from __future__ import annotations

import hashlib
import json
import queue
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden.errors import CadenError, Interrupted, RunError
from caden.graphs import Graph
from caden.networks.peers.fleet import Fleet
from caden.networks.peers.transports import LANES

CHUNK = 1 << 20  # bytes of one reply
WINDOW = 4  # replies asked for at a time
BEAT = 0.2  # seconds between two notices
ASK = 2.0  # seconds that a reply may take
_MAGIC = b"cdn1"
_ROW = struct.Struct("<4sBxHqQQI8s")  # magic, dtype, sender, version, bytes of the row, offset, bytes here, checksum
_NOTE = struct.Struct("<4sHHqq8s")  # magic, sender, agents, newest version, rounds done, checksum
_ENTRY = struct.Struct("<qIB")  # an agent's version, how long it has been calm, flags
_DTYPES = {torch.float32: 0, torch.float64: 1}
FINISHED, AGREED = 1, 2


class Entry(NamedTuple):
    """What is known of an agent."""

    version: int = -1  # its step when it said so
    calm: int = 0  # sweeps in a row with changes below the tolerance
    flags: int = 0

    def merge(self, other: Entry) -> Entry:
        """The newer of the two; of the same step, all that is known."""
        if self.version != other.version:
            return max(self, other)
        return Entry(self.version, max(self.calm, other.calm), self.flags | other.flags)


class Refused(Exception):
    """A message that does not fit."""


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _bytes(row: Tensor) -> memoryview:
    """The memory of a row, to read from or to write to."""
    array: Any = row.numpy()
    return memoryview(array).cast("B")


def pack_note(sender: int, newest: int, rounds: int, table: list[Entry]) -> bytes:
    """A notice as bytes."""
    body = b"".join(_ENTRY.pack(*entry) for entry in table)
    head = _NOTE.pack(_MAGIC, sender, len(table), newest, rounds, bytes(8))
    return _NOTE.pack(_MAGIC, sender, len(table), newest, rounds, _checksum(head + body)) + body


def unpack_note(data: bytes, sender: int, agents: int) -> tuple[int, int, list[Entry]]:
    """Newest version, rounds done and table, or Refused."""
    if len(data) != _NOTE.size + agents * _ENTRY.size:
        raise Refused("a notice of the wrong length")
    magic, who, count, newest, rounds, checksum = _NOTE.unpack_from(data)
    body = data[_NOTE.size :]
    if magic != _MAGIC or checksum != _checksum(_NOTE.pack(magic, who, count, newest, rounds, bytes(8)) + body):
        raise Refused("a damaged notice")
    if who != sender or count != agents:
        raise Refused("a notice of somebody else")
    return newest, rounds, [Entry(*_ENTRY.unpack_from(body, n * _ENTRY.size)) for n in range(agents)]


def pack_row(sender: int, version: int, dtype: torch.dtype, total: int, offset: int, chunk: bytes) -> bytes:
    """The header of a piece of a row."""
    return _ROW.pack(_MAGIC, _DTYPES[dtype], sender, version, total, offset, len(chunk), _checksum(chunk))


def read_row_header(
    header: bytes, sender: int, dtype: torch.dtype, total: int, offset: int, length: int
) -> tuple[int, bytes]:
    """Version and checksum of a piece whose header fits what was asked for, or Refused; looks at no payload."""
    if len(header) != _ROW.size:
        raise Refused("a row without a header")
    magic, kind, who, version, size, place, here, checksum = _ROW.unpack(header)
    if magic != _MAGIC or who != sender:
        raise Refused("a row of somebody else")
    if kind != _DTYPES[dtype] or size != total:
        raise Refused("a row of another type or dimension")
    if place != offset or here != length or length != min(CHUNK, total - offset):
        raise Refused("a row of the wrong length")
    return version, checksum


class ZenohLink:
    """A peer's connection to its neighbours."""

    def __init__(
        self,
        fleet: Fleet,
        graph: Graph,
        agent: int,
        like: Tensor,
        home: Path = Path(),
        folder: Path | None = None,
        stop: threading.Event | None = None,
    ):
        try:
            import zenoh
        except ImportError:
            raise CadenError('Peers need the extra "peers": pip install "caden-opt[peers]".') from None
        if like.dtype not in _DTYPES or like.device.type != "cpu":
            raise CadenError("Peers send float32 or float64 from the CPU.")
        self._fleet, self._graph, self._agent, self._like = fleet, graph, agent, like
        self._home, self._folder, self._stop = home, folder, stop or threading.Event()
        self.neighbours = graph.neighbours(agent)
        self._free = fleet.mode == "free"
        self._changed = threading.Condition()
        self._speaking = threading.Lock()  # notices leave in the order in which they were true
        self._out: dict[int, dict[int, Tensor]] = {}  # version -> neighbour -> row
        self._pinned: dict[int, tuple[int, Tensor]] = {}  # what a neighbour is fetching piece by piece
        self._mail: dict[int, tuple[int, Tensor]] = {}
        self._newest = dict.fromkeys(self.neighbours, -1)
        self._done = dict.fromkeys(self.neighbours, -1)  # rounds that they have done; -1: not even the start
        self._heard = dict.fromkeys(self.neighbours, -1.0)  # when a notice came
        self._brought = dict.fromkeys(self.neighbours, -1.0)  # when a row came
        self.table = [Entry()] * graph.agents
        self.refused: Counter[str] = Counter()
        self.wire_bytes, self.rounds, self.slowest = 0, -1, 0.0
        self._news, self._seen, self._closing = 0, 0, threading.Event()
        self._began = time.monotonic()
        self._grew = [self._began] * graph.agents  # when an agent's step was last seen to grow
        self._trusted: set[int] = set()  # neighbours that counted before a restart
        self._zenoh: Any = zenoh
        try:
            self._session: Any = zenoh.open(self._config())
        except zenoh.ZError as error:
            raise CadenError(f"Agent {agent} cannot listen on {fleet.endpoints[agent]}: {error}.") from None
        self._publisher = self._session.declare_publisher(
            self._key("note", agent),
            congestion_control=zenoh.CongestionControl.DROP,
            priority=zenoh.Priority.REAL_TIME,
            express=True,
        )
        self._held: list[Any] = []  # subscribers and queryables live as long as somebody holds them
        self._threads = [threading.Thread(target=self._beat, daemon=True)]
        for j in self.neighbours:
            asked: queue.Queue[Any] = queue.Queue(4 * WINDOW)  # of one neighbour: a slow one delays only itself
            self._threads.append(threading.Thread(target=self._answer, args=(j, asked), daemon=True))
            if self._free:
                self._threads.append(threading.Thread(target=self._follow, args=(j,), daemon=True))
            ask, note = partial(self._ask, asked), partial(self._note, j)
            self._held.append(self._session.declare_queryable(self._key("row", agent, j), ask))
            self._held.append(self._session.declare_subscriber(self._key("note", j), note))
        for thread in self._threads:
            thread.start()

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._fleet.name, *parts)))

    def _config(self) -> Any:
        fleet, me = self._fleet, self._agent
        config = self._zenoh.Config()
        settings: dict[str, Any] = {
            "mode": "peer",
            "listen/endpoints": [fleet.endpoints[me]],
            "connect/endpoints": [fleet.endpoints[j] for j in self.neighbours if j < me],  # one link for an edge
            "connect/exit_on_failure": False,
            "connect/timeout_ms": -1,  # try again for ever, beside everything else
            "connect/retry": {"period_init_ms": 200, "period_max_ms": 1000, "period_increase_factor": 1.5},
            "scouting/multicast/enabled": False,
            "scouting/gossip/enabled": False,
            "transport/link/tx/lease": 2000,
            "transport/link/tx/queue/congestion_control/block/wait_before_close": 500000,
            "transport/link/rx/max_message_size": 4 * CHUNK,
        }
        if fleet.certificates:
            folder = self._home / fleet.certificates
            files = {n: folder / n for n in ("ca.pem", f"agent-{me}.pem", f"agent-{me}.key")}
            for file in files.values():
                if not file.exists():
                    raise CadenError(f"{file} is missing; `caden fleet init --tls` makes certificates.")
            own = {"private_key": str(files[f"agent-{me}.key"]), "certificate": str(files[f"agent-{me}.pem"])}
            settings["transport/link/tls"] = {
                "root_ca_certificate": str(files["ca.pem"]),
                "enable_mtls": True,
                **{f"{side}_{k}": v for side in ("listen", "connect") for k, v in own.items()},
            }
            settings["access_control"] = self._access()
        for key, value in settings.items():
            config.insert_json5(key, json.dumps(value))
        return config

    def _access(self) -> dict[str, Any]:
        """Nothing is allowed but: a neighbour speaks as the agent that its certificate names, and asks for its rows."""
        me, rules, policies = self._agent, list[Any](), list[Any]()
        for j in self.neighbours:
            allowed: dict[str, tuple[str, list[str], str]] = {}
            for flow, here, there in (("ingress", j, me), ("egress", me, j)):
                allowed |= {
                    f"{flow}/put/{j}": (flow, ["put"], self._key("note", here)),
                    f"{flow}/listen/{j}": (flow, ["declare_subscriber"], self._key("note", there)),
                    f"{flow}/ask/{j}": (flow, ["query"], self._key("row", there, here)),
                    f"{flow}/reply/{j}": (flow, ["reply", "declare_queryable"], self._key("row", here, there)),
                }
            rules += [
                {"id": name, "permission": "allow", "flows": [flow], "messages": messages, "key_exprs": [key]}
                for name, (flow, messages, key) in allowed.items()
            ]
            policies.append({"rules": list(allowed), "subjects": [f"agent-{j}"]})
        subjects = [{"id": f"agent-{j}", "cert_common_names": [f"agent-{j}"]} for j in self.neighbours]
        common = {"enabled": True, "default_permission": "deny"}
        return {**common, "rules": rules, "subjects": subjects, "policies": policies}

    # What comes in.

    def _refuse(self, neighbour: int, why: object) -> None:
        """Count, and write the first ones down."""
        self.refused[f"{neighbour}: {why}"] += 1
        if self._folder is not None and self.refused[f"{neighbour}: {why}"] == 1 and len(self.refused) < 100:
            with (self._folder / "refused.log").open("a") as file:
                file.write(f"{time.time():.3f} agent {neighbour}: {why}\n")

    def _note(self, neighbour: int, sample: Any) -> None:
        agents = self._graph.agents
        try:
            if len(sample.payload) != _NOTE.size + agents * _ENTRY.size:
                raise Refused("a notice of the wrong length")
            newest, rounds, table = unpack_note(bytes(sample.payload), neighbour, agents)
        except Refused as why:
            self._refuse(neighbour, why)
            return
        with self._changed:
            if newest < self._newest[neighbour]:
                self._refuse(neighbour, "an old version (replayed, or it was restarted)")
            self._heard[neighbour] = time.monotonic()
            self._newest[neighbour] = max(newest, self._newest[neighbour])
            self._done[neighbour] = max(rounds, self._done[neighbour])
            self._merge(table)
            self._changed.notify_all()

    def _merge(self, table: list[Entry]) -> None:
        now = time.monotonic()
        for agent, (ours, theirs) in enumerate(zip(self.table, table)):
            if agent != self._agent:  # of ourselves nobody knows more
                self.table[agent] = ours.merge(theirs)
                if theirs.version > ours.version:
                    self._grew[agent] = now

    def _fetch(self, neighbour: int, version: int, like: Tensor) -> tuple[int, Tensor] | None:
        """A row of the neighbour, the newest for -1; None if it cannot be had now."""
        total = like.numel() * like.element_size()
        row = torch.empty(like.shape, dtype=like.dtype)
        memory = _bytes(row)
        waiting: deque[tuple[int, Any]] = deque()
        offsets = deque(range(0, total, CHUNK))
        try:
            while offsets or waiting:
                while offsets and len(waiting) < (WINDOW if version >= 0 else 1):
                    offset = offsets.popleft()
                    selector = f"{self._key('row', neighbour, self._agent)}?v={version};o={offset}"
                    waiting.append((offset, self._session.get(selector, timeout=ASK)))
                offset, replies = waiting.popleft()
                reply = next((r.ok for r in replies if r.ok is not None), None)
                if reply is None:
                    return None
                header = b"" if reply.attachment is None else bytes(reply.attachment)
                found, checksum = read_row_header(header, neighbour, like.dtype, total, offset, len(reply.payload))
                if (version >= 0 and found != version) or found < 0:
                    raise Refused("a row of another version")
                version, piece = found, bytes(reply.payload)
                if _checksum(piece) != checksum:
                    raise Refused("a damaged row")
                memory[offset : offset + len(piece)] = piece
            if not bool(row.isfinite().all()):
                raise Refused("a row with numbers that are not finite")
            return version, row
        except Refused as why:
            self._refuse(neighbour, why)
        except self._zenoh.ZError:
            pass
        return None

    def _follow(self, neighbour: int) -> None:
        """Keep the newest row of a neighbour at hand."""
        while not self._closing.is_set():
            with self._changed:
                have = self._mail[neighbour][0] if neighbour in self._mail else -1
                if self._newest[neighbour] <= have:
                    self._changed.wait(BEAT)
                    continue
            found = self._fetch(neighbour, -1, self._like)
            if found is None or found[0] <= have:
                self._closing.wait(0.05)
                continue
            with self._changed:
                self._mail[neighbour] = found
                self._brought[neighbour] = time.monotonic()
                self._news += 1
                self._changed.notify_all()

    # What goes out.

    def _ask(self, asked: queue.Queue[Any], query: Any) -> None:
        with suppress(queue.Full):  # it asks again
            asked.put_nowait(query)

    def _answer(self, neighbour: int, asked: queue.Queue[Any]) -> None:
        while not self._closing.is_set():
            try:
                query = asked.get(timeout=BEAT)
            except queue.Empty:
                continue
            try:
                wanted = dict(part.split("=") for part in str(query.parameters).split(";"))
                version, offset = int(wanted["v"]), int(wanted["o"])
            except (KeyError, ValueError):
                self._refuse(neighbour, "a question that makes no sense")
                continue
            with self._changed:
                if version < 0:
                    version = max((v for v, rows in self._out.items() if neighbour in rows), default=-1)
                    if version >= 0:
                        self._pinned[neighbour] = (version, self._out[version][neighbour])
                row = self._out.get(version, {}).get(neighbour)
                if row is None and version >= 0 and self._pinned.get(neighbour, (-1,))[0] == version:
                    row = self._pinned[neighbour][1]
            if row is None or not 0 <= offset < row.numel() * row.element_size():
                query.drop()
                continue
            data = _bytes(row)
            piece = bytes(data[offset : offset + CHUNK])
            header = pack_row(self._agent, version, row.dtype, len(data), offset, piece)
            with self._changed:
                self.wire_bytes += len(piece) + len(header)
            with suppress(self._zenoh.ZError):
                query.reply(query.key_expr, piece, attachment=header)
            query.drop()

    def _announce(self) -> None:
        with self._speaking:
            with self._changed:
                newest = max(self._out, default=-1)
                note = pack_note(self._agent, newest, self.rounds, self.table)
                self.wire_bytes += len(note) * len(self.neighbours)
            with suppress(self._zenoh.ZError):
                self._publisher.put(note)

    def _beat(self) -> None:
        while not self._closing.wait(BEAT):
            self._announce()

    def publish(self, version: int, rows: Mapping[int, Tensor]) -> None:
        began = time.monotonic()
        copies: dict[int, Tensor] = {}
        for j, row in rows.items():
            same = next((copies[k] for k in copies if rows[k] is row), None)
            copies[j] = row.detach().clone() if same is None else same
        with self._changed:
            self._out[version] = copies
            # A neighbour is at most a round behind, and may have to do again a round that it did.
            oldest = version - 1 if self._free else (version // LANES - 2) * LANES
            for old in [v for v in self._out if v < oldest]:
                del self._out[old]
        self._announce()
        self.slowest = max(self.slowest, time.monotonic() - began)

    def buffers(self) -> dict[str, Tensor]:
        """What a restarted peer must know, and be able to say again."""
        with self._changed:
            table = torch.tensor([list(entry) for entry in self.table])
            return {"table": table} | {f"{v}.{j}": row for v, rows in self._out.items() for j, row in rows.items()}

    def restore(self, buffers: dict[str, Tensor], members: set[int]) -> None:
        """Take back what `buffers` gave; who was a member is one until it has been silent for too long."""
        with self._changed:
            self._trusted = members
            self._merge([Entry(*entry) for entry in buffers.pop("table").tolist()])
            for name, row in buffers.items():
                version, neighbour = map(int, name.split("."))
                self._out.setdefault(version, {})[neighbour] = row

    # What a peer asks.

    def say(self, rounds: int, calm: int = 0, flags: int = 0) -> None:
        """Tell the others how far we are."""
        with self._changed:
            self.rounds, self.table[self._agent] = rounds, Entry(rounds, calm, flags)
        if flags:
            self._announce()

    def wait(self, neighbour: int, version: int, like: Tensor) -> Tensor:
        def there() -> bool:
            return self._newest[neighbour] >= version

        began = offered = time.monotonic()
        while True:
            with self._changed:
                ready = self._changed.wait_for(there, BEAT)
            if ready:
                found = self._fetch(neighbour, version, like)
                if found is not None:
                    return found[1]
                if time.monotonic() - offered > self._fleet.patience:
                    raise RunError(f"Agent {neighbour} offers version {version}, but it cannot be had.")
                self._closing.wait(0.02)
            else:
                offered = time.monotonic()
            self._alive(neighbour, began)

    def keep_step(self, round: int) -> None:
        """Wait until no neighbour is more than a round behind: what they still need is kept for so long."""
        began = time.monotonic()
        for j in self.neighbours:
            while self._done[j] < round - 1:
                with self._changed:
                    self._changed.wait(BEAT)
                self._alive(j, began)

    def _alive(self, neighbour: int, began: float) -> None:
        """Give up on a neighbour that has been silent for longer than our patience, or if we are told to stop."""
        if self._stop.is_set():
            raise Interrupted(f"Agent {self._agent} stopped while it waited; the same command goes on.")
        silent = time.monotonic() - max(began, self._heard[neighbour])
        if silent > self._fleet.patience:
            raise RunError(f"Agent {neighbour} has been silent for {silent:.0f} s; the same command goes on later.")

    def await_start(self) -> None:
        """Free: give the neighbours a little time to be there at the start; nobody is needed."""

        def there() -> bool:
            return len(self._mail) == len(self.neighbours) or self._stop.is_set()

        with self._changed:
            self._changed.wait_for(there, min(10.0, self._fleet.forget))

    def news(self, timeout: float) -> None:
        """Wait until something new has come from anybody, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: self._news > self._seen or self._closing.is_set(), timeout)
            self._seen = self._news

    def silent(self, neighbour: int) -> float:
        """Seconds since a neighbour was heard; infinite if it never was."""
        heard = max(self._heard[neighbour], self._began if neighbour in self._trusted else -1.0)
        return time.monotonic() - heard if heard >= 0 else float("inf")

    def members(self, step: int) -> set[int]:
        with self._changed:
            known = {*self._mail, *self._trusted}
            return {j for j in known if self.silent(j) < self._fleet.forget or j in self.finished()}

    def finished(self) -> set[int]:
        """Agents that have done what they had to do."""
        return {agent for agent, entry in enumerate(self.table) if entry.flags & FINISHED}

    def read(self, step: int) -> dict[int, tuple[int, Tensor]]:
        if step < 0:
            self.await_start()
        with self._changed:
            return dict(self._mail)

    def stale(self) -> float:
        """Seconds since the neighbour whose row is oldest brought one."""
        now = time.monotonic()
        return max((now - max(at, self._began) for at in self._brought.values()), default=0.0)

    def agreed(self, calm: int) -> bool:
        """Whether all that are here have been calm for long enough, or somebody found that they had.

        Of an agent whose step has not grown for long, as far as news of it came, nothing is expected any more.
        """
        old = time.monotonic() - self._fleet.forget - 2 * BEAT * self._graph.diameter
        with self._changed:
            if any(entry.flags & AGREED for entry in self.table):
                return True
            silent = [self._grew[k] < old and k != self._agent for k in range(len(self.table))]
            return all(e.calm >= calm or e.flags & FINISHED or gone for e, gone in zip(self.table, silent))

    def linger(self, stop: threading.Event) -> None:
        """Stay as long as a neighbour that is here has not finished: it may still need us."""
        end = time.monotonic() + self._fleet.patience
        while time.monotonic() < end and not stop.is_set():
            with self._changed:
                needed = [
                    j
                    for j in self.neighbours
                    if not self.table[j].flags & FINISHED and self.silent(j) < min(self._fleet.forget, 10.0)
                ]
            if not needed:
                break
            stop.wait(BEAT)
        stop.wait(2 * BEAT)  # for the last notice to be heard

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(ASK + 1)
        self._session.close()
