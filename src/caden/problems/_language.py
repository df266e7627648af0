"""Character-level language models over agents that each hold the texts of some authors."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from caden import data as datasets
from caden.draws import seeded
from caden.errors import CadenError, require_integer
from caden.problems._classification import classification
from caden.problems._model import accuracy
from caden.problems._module import Module

_HELD_OUT = 10  # one part in so many of each author's text, the end of it


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look, self.gather = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = batch, length, self.heads, width // self.heads
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.look(self.before(x)).chunk(3, dim=-1))
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.gather(seen.transpose(1, 2).reshape(batch, length, width)))
        out: Tensor = x + self.drop(self.narrow(gelu(self.widen(self.between(x)))))
        return out


class Transformer(nn.Module):
    """A decoder that predicts the next token; the embedding is also the output layer."""

    def __init__(self, tokens: int, context: int, width: int, layers: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:
            for layer in (block.gather, block.narrow):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * layers))  # type: ignore[union-attr, arg-type]
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores: Tensor = self.out(self.norm(self.blocks(self.embed(tokens) + self.place(places))))
        return scores


def transformer(
    tokens: int, context: int, width: int = 128, layers: int = 5, heads: int = 4, dropout: float = 0.0, seed: int = 0
) -> Transformer:
    """A small transformer.

    >>> sum(p.numel() for p in transformer(99, 64).parameters())
    1006720
    """
    for name, value in (("width", width), ("layers", layers), ("heads", heads), ("context", context)):
        require_integer(name, value, least=1)
    if width % heads:
        raise CadenError(f"`width` must be a multiple of `heads`, got {width} and {heads}.")
    with seeded(seed):
        return Transformer(tokens, context, width, layers, heads, dropout)


def nats(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy per token."""
    return cross_entropy(output.flatten(0, -2), target.flatten())


def language(
    data: str = "sotu",
    agents: int = 20,
    context: int = 64,
    width: int = 128,
    layers: int = 5,
    heads: int = 4,
    dropout: float = 0.0,
    batch_size: int | None = 16,
    test_samples: int = 1000,
    validation: int = 0,
    microbatch: int | None = None,
    autocast: str | None = None,
    compile: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    hosted: list[int] | None = None,
) -> Module:
    """A transformer that predicts the next character of texts, split over the agents by author.

    The end of each author's texts is held out: of its windows, `test_samples` are the test set. With `validation`,
    so many others of them take its place.
    """
    require_integer("agents", agents, least=1), require_integer("validation", validation)
    texts = datasets.load_texts(data)
    if agents > len(texts):
        raise CadenError(f"`agents` must be at most {len(texts)}, the number of authors, got {agents}.")
    alphabet = sorted({character for text in texts.values() for character in text})
    code = {character: number for number, character in enumerate(alphabet)}
    if context >= min(len(text) // _HELD_OUT for text in texts.values()):
        raise CadenError(f"`context` must be shorter than a tenth of every author's texts, got {context}.")
    windows: list[Tensor] = []
    held_out: list[Tensor] = []
    parts: list[list[np.ndarray]] = [[] for _ in range(agents)]
    count = 0
    for text in sorted(texts.values(), key=len, reverse=True):  # the next author goes to whoever has the least
        numbers = torch.tensor([code[character] for character in text])
        cut = len(numbers) - len(numbers) // _HELD_OUT
        windows.append(numbers[:cut].unfold(0, context + 1, context))
        held_out.append(numbers[cut:].unfold(0, context + 1, context))
        fewest = min(range(agents), key=lambda i: sum(map(len, parts[i])))
        parts[fewest].append(np.arange(count, count + len(windows[-1])))
        count += len(windows[-1])
    train, rest = torch.cat(windows), torch.cat(held_out)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(rest)))
    wanted = slice(test_samples, test_samples + validation) if validation else slice(0, test_samples)
    if require_integer("test_samples", test_samples, least=1) + validation > len(rest):
        raise CadenError(f"`test_samples` and `validation` must be at most {len(rest)} together.")
    test = rest[order[wanted]]
    return classification(
        transformer(len(alphabet), context, width, layers, heads, dropout, seed),
        (train[:, :-1], train[:, 1:]),
        (test[:, :-1], test[:, 1:]),
        agents,
        [np.concatenate(part) for part in parts],
        metrics={"accuracy": accuracy, "validation_loss": nats},
        seed=seed,
        dtype=dtype,
        device=device,
        hosted=hosted,
        batch_size=batch_size,
        microbatch=microbatch,
        autocast=autocast,
        compile=compile,
    )
