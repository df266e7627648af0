"""Copies: messages that are compressed, or sent only if they say something new.

Sender and receivers hold a copy of what was sent, and update it alike.

- Compression with error feedback. What is sent is the compressed difference between the row and its copy, which is then
  added to all copies. Whatever was left out is part of the next difference, so an entry that settles is eventually
  known exactly. The first message of each kind is sent whole.
- Triggers. A message is sent only if the row is further from its copy than a threshold, which may decay. Otherwise a
  notice of one byte says that the sender is awake, and all continue with the copy, so sums are preserved. Methods that
  survive compression are exact if the thresholds have a finite sum; a constant one leaves an error of its order.

Where messages may be lost or late, those of an arc are numbered. A difference fits only the copy that its sender had in
mind: if a number is missing, the receiver asks for the whole row, with every message of its own until that has come.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caden.networks.codec import Codec


class RowCopies(NamedTuple):
    """Copies of the rows of all agents that this process knows; the first are those of its own agents."""

    public: Tensor  # (rows, d)
    codec: Codec | None

    def pack(self, rows: Tensor, sending: Tensor) -> Tensor:
        """Return what the own agents send: (k, d) -> (k, n) numbers, or bytes."""
        return _packed(rows, self.public[: len(rows)], sending, self.codec)

    def update(self, payload: Tensor, sent: Tensor) -> Tensor:
        """Return the copies after the messages of the rows that have `sent` (rows, 1) one."""
        at = sent.squeeze(1).nonzero().flatten()
        public = self.public.clone()
        public[at] = _next_copy(public[at], payload[at], self.codec)
        return public


class Notice(NamedTuple):
    """What goes over an arc in a round; each is (2e, 1)."""

    whole: Tensor  # bool: a whole row
    part: Tensor  # bool: a difference; neither: nothing new
    number: Tensor  # of the last message over this arc
    lacking: Tensor  # its sender lacks a message from the other side

    def columns(self, dtype: torch.dtype) -> Tensor:
        """Return the notice as numbers, (2e, 4)."""
        return torch.cat([part.to(dtype) for part in self], dim=1)

    @classmethod
    def read(cls, columns: Tensor, came: Tensor) -> "Notice":
        """Return the notice in `columns` where one `came`."""
        whole, part, number, lacking = (columns[:, n : n + 1].long() for n in range(4))
        return cls(came & (whole > 0), came & (part > 0), number, lacking)


class ArcCopies(NamedTuple):
    """Copies of the messages over arcs; every tensor has an entry for each arc, which its owner keeps."""

    public: Tensor  # (2e, d) what the peer has, if everything arrived
    heard: Tensor  # (2e, d) what the owner has of its peer's messages
    number: Tensor  # (2e, 1) messages sent to the peer
    applied: Tensor  # (2e, 1) number of the peer's last message that is in `heard`
    lacking: Tensor  # (2e, 1) whether the owner lacks a message of its peer, and asks for the whole row
    asked: Tensor  # (2e, 1) whether the peer has asked for the whole row

    @classmethod
    def none(cls, like: Tensor) -> "ArcCopies":
        """Return copies of nothing, for messages (2e, d)."""
        zeros = torch.zeros_like(like)
        return cls(zeros, zeros, *(zeros[:, :1].long() for _ in range(4)))

    def send(self, rows: Tensor, new: Tensor, sends: Tensor, codec: Codec | None) -> tuple[Tensor, Notice, "ArcCopies"]:
        """Return the packed differences, what goes over each arc, and the copies afterwards.

        An arc whose owner `sends` (2e, 1) has a message if it is `new`, the first, or asked for.
        """
        needed = (self.number == 0) | (self.asked > 0)
        spoke = sends & (new | needed)
        whole = spoke if codec is None else spoke & needed
        part = spoke & ~whole
        payload = _packed(rows, self.public, part, codec)
        public, at = torch.where(whole, rows, self.public), part.squeeze(1).nonzero().flatten()
        public[at] = _next_copy(public[at], payload[at], codec)
        copies = self._replace(public=public, number=self.number + spoke, asked=self.asked * ~whole)
        return payload, Notice(whole, part, copies.number, self.lacking), copies

    def expected(self, comes: Tensor, codec: Codec | None) -> Notice:
        """Return what comes if all who send have something new and nothing is lost."""
        whole = comes if codec is None else comes & (self.applied == 0)
        return Notice(whole, comes & ~whole, self.applied + comes, torch.zeros_like(self.lacking))

    def receive(self, rows: Tensor, notice: Notice, came: Tensor, sent: Notice) -> tuple[Tensor, "ArcCopies"]:
        """Return where the copy is what the peer has in mind, and the copies; `rows` has whole rows and differences."""
        fits = notice.whole | (notice.part & (notice.number == self.applied + 1))
        heard = torch.where(notice.whole, rows, torch.where(fits, self.heard + rows, self.heard))
        applied = torch.where(fits, notice.number, self.applied)
        lacking = torch.where(came, (applied < notice.number).long(), self.lacking)
        asked = torch.where(came & ~sent.whole, notice.lacking, self.asked)
        valid = came & (applied == notice.number) & (applied > 0)
        return valid, self._replace(heard=heard, applied=applied, lacking=lacking, asked=asked)


def _packed(rows: Tensor, copies: Tensor, sending: Tensor, codec: Codec | None) -> Tensor:
    """Return what is sent of the rows: the rows, or packed differences where `sending` (n, 1)."""
    if codec is None:
        return rows
    payload = rows.new_zeros(len(rows), codec.size(rows.shape[1], rows.element_size()), dtype=torch.uint8)
    at = sending.squeeze(1).nonzero().flatten()
    payload[at] = codec.pack(rows[at] - copies[at])
    return payload


def _next_copy(copies: Tensor, payload: Tensor, codec: Codec | None) -> Tensor:
    """Return the copies (n, d) after the messages `payload` (n, ...)."""
    if codec is None:
        return payload
    return copies + codec.unpack(payload, copies.shape[1], copies.dtype)
