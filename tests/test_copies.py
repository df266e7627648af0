"""Compressed and triggered messages: bytes on the wire, copies at both ends, and what is exact over which network."""

import numpy as np
import pytest
import torch

import caden
from caden import methods
from caden.draws import Draw
from caden.errors import RunError
from caden.networks.codec import BLOCK, Codec
from caden.networks.messages import Messages
from caden.networks.peers.offers import Offers, apply_difference
from caden.solvers import exact

CODECS = [Codec(top=0.3), Codec(top=0.01), Codec(bits=1), Codec(bits=3), Codec(bits=8), Codec(bits=11), Codec(bits=16)]
CODECS += [Codec(top=0.2, bits=1), Codec(top=0.03, bits=5)]


def rows_of(width, seed=0, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    rows = torch.tensor(rng.normal(size=(4, width)) * rng.uniform(size=(4, width)) ** 3, dtype=dtype)
    rows[2] = 0
    return rows


@pytest.mark.parametrize("width", [1, 7, 100, BLOCK, BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_packed_rows_have_their_size_and_come_closer(codec, dtype, width):
    rows = rows_of(width, dtype=dtype)
    data = codec.pack(rows)
    assert data.dtype == torch.uint8 and data.shape == (4, codec.size(width, dtype.itemsize))
    back = codec.unpack(data, width, dtype)
    assert back.dtype == dtype and (back[2] == 0).all()
    left, length = torch.linalg.vector_norm(rows - back, dim=1), torch.linalg.vector_norm(rows, dim=1)
    assert bool((left <= length * (1 + 1e-6)).all()) and float(left[0]) < float(length[0])
    assert torch.equal(codec.unpack(codec.pack(rows[1:2]), width, dtype), back[1:2])  # whatever rows come along


def test_the_largest_entries_are_sent_as_they_are():
    rows = rows_of(50)
    for top in (0.1, 0.5):  # as indices and as a map
        back, count = Codec(top=top).unpack(Codec(top=top).pack(rows), 50, torch.float64), int(50 * top)
        for row, got in zip(rows.numpy(), back.numpy()):
            kept = np.argsort(-abs(row))[:count]
            assert set(np.flatnonzero(got)) <= set(kept)
            np.testing.assert_array_equal(got[kept], row[kept])
    assert Codec(top=0.01).size(1000, 4) == 10 * (4 + 4) and Codec(top=0.1).size(1000, 4) == 125 + 100 * 4


def test_one_bit_is_the_sign_times_the_mean_size():
    rows = rows_of(200)[:2]
    back = Codec(bits=1).unpack(Codec(bits=1).pack(rows), 200, torch.float64)
    torch.testing.assert_close(back, torch.where(rows >= 0, 1.0, -1.0) * rows.abs().mean(1, keepdim=True))


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 12])
def test_levels_are_evenly_spaced_and_as_good_as_the_known_optimum_for_gaussian_numbers(bits):
    rows = torch.tensor(np.random.default_rng(0).normal(size=(1, BLOCK)))
    back = Codec(bits=bits).unpack(Codec(bits=bits).pack(rows), BLOCK, torch.float64)
    levels = back.unique()
    gaps = levels.diff()
    assert len(levels) <= 2**bits
    torch.testing.assert_close(gaps / gaps.min(), (gaps / gaps.min()).round())  # multiples of one distance
    error = float(((back - rows) ** 2).mean() / (rows**2).mean())
    best = {2: 0.1188, 3: 0.03744, 4: 0.01154, 6: 0.001041, 8: 8.769e-5}  # Max, 1960, uniform output levels
    assert error < 1.15 * best.get(bits, 1.0)


def test_blocks_have_scales_of_their_own():
    rows = torch.cat([torch.randn(1, BLOCK), 1e-4 * torch.randn(1, BLOCK)], dim=1).double()
    back = Codec(bits=4).unpack(Codec(bits=4).pack(rows), 2 * BLOCK, torch.float64)
    for part in (slice(0, BLOCK), slice(BLOCK, None)):
        assert float((back - rows)[0, part].norm() / rows[0, part].norm()) < 0.15


@pytest.mark.parametrize("codec", [Codec(top=0.1), Codec(top=0.5)], ids=str)
def test_bytes_that_no_codec_wrote_are_refused(codec):
    data = codec.pack(rows_of(200)[:1])
    data[0, : 4 if codec.top == 0.1 else 24] = 255  # an entry 2^32 - 1; too many entries
    with pytest.raises(RunError, match="compressed message"):
        codec.unpack(data, 200, torch.float64)


@pytest.fixture(scope="module")
def setting():
    return caden.problems.quadratic(agents=12, dim=20, seed=0), caden.graphs.erdos_renyi(12, edges=20, seed=0)


DECAYING = {"trigger": {"first": 1.0, "decay": 0.95}}
NETWORKS = {
    "reliable": {},
    "lost": {"loss": 0.2},
    "late": {"delay": 3},
    "lost and late": {"loss": 0.2, "delay": 2},
}


LESS = {"top": 0.05}, {"bits": 1}, {"top": 0.2, "bits": 2}, DECAYING, {**DECAYING, "bits": 4}
FAST = {("reliable", False): LESS, ("lost and late", True): LESS[2::2]}  # by network and whether agents sleep


@pytest.mark.parametrize(
    ("less", "network", "asleep"),
    [
        pytest.param(less, network, asleep, marks=[] if less in FAST.get((network, asleep), ()) else [pytest.mark.slow])
        for less in LESS
        for network in NETWORKS
        for asleep in (False, True)
    ],
    ids=str,
)
def test_caden_is_exact_with_fewer_bytes_over_any_network(setting, less, network, asleep):
    """Compression that makes the agent form diverge, also with losses and delays; the first row is not compressed."""
    problem, graph = setting
    options = {"participation": 0.5 if asleep else 1.0, "tolerance": 1e-16, "record_every": 20}
    method = methods.caden(0.4, relax=0.8, solver=exact())
    short = caden.simulate(method, problem, graph, 4000, messages={**NETWORKS[network], **less}, **options)
    assert float((short.x - problem.solution).norm(dim=1).max()) < 1e-7
    assert short.stopped == "tolerance"
    if network == "reliable":
        plain = caden.simulate(method, problem, graph, 4000, **options)
        assert short.rows[-1]["bytes"] < 0.6 * plain.rows[-1]["bytes"]


def test_the_agent_form_would_diverge(setting):
    """Why compression asks for arcs: the same method in agent variables, on copies that are compressed by hand."""
    problem, graph = setting
    A, b, L, mu = problem.hessian.numpy(), problem.linear.numpy(), graph.laplacian, 1.0
    x = np.zeros((12, 20))
    phi, copy, gap = np.zeros_like(x), x.copy(), np.zeros_like(x)
    for _ in range(300):
        for i in range(12):
            weight = mu * graph.degrees[i]
            right = b[i] - phi[i] - mu * gap[i] + weight * x[i]
            x[i] = np.linalg.solve(A[i] + weight * np.eye(20), right)
        change = x - copy
        copy += np.sign(change) * abs(change).mean(1, keepdims=True)  # one bit
        gap = (L @ copy) / 2
        phi += mu / 2 * (L @ copy)
    assert np.linalg.norm(x) > 1e6


def test_differences_and_triggers_under_loss_equal_a_textbook_loop(setting):
    """Arc by arc and message by message, with numbers, requests for whole rows, and losses as drawn."""
    problem, graph = setting
    A, b, mu, relax, seen = problem.hessian.numpy(), problem.linear.numpy(), 0.5, 0.7, []
    model = {"loss": 0.3, "top": 0.2, "trigger": {"first": 0.5, "decay": 0.9}}
    caden.simulate(
        methods.radmm(mu, relax, solver=exact()),
        problem,
        graph,
        40,
        messages=model,
        callbacks=[lambda row, state: seen.append((state.x.numpy().copy(), row["communications"], row["bytes"]))],
    )
    arcs = [tuple(e) for e in graph.edges.tolist()]
    arcs += [(j, i) for i, j in arcs]
    degree = np.bincount([i for i, _ in arcs])
    zero = np.zeros(20)
    z, mine, theirs = ({a: zero.copy() for a in arcs} for _ in range(3))  # theirs: what i has heard over (j, i)
    number, applied, lacks, asked = (dict.fromkeys(arcs, 0) for _ in range(4))
    sent = size = 0
    for t, (expected, communications, counted) in enumerate(seen):
        pull = {i: sum(z[a] for a in arcs if a[0] == i) for i in range(12)}
        x = np.array([np.linalg.solve(A[i] + mu * degree[i] * np.eye(20), b[i] + pull[i]) for i in range(12)])
        arrives = Messages.from_spec(model).arrives(Draw(0, 12), t, 0, len(arcs)).numpy()[:, 0]
        post = {}
        for i, j in arcs:
            q = 2 * mu * x[i] - z[i, j]
            whole = number[i, j] == 0 or asked[i, j]
            if whole or np.linalg.norm(q - mine[i, j]) > 0.5 * 0.9**t:
                number[i, j] += 1
                if whole:
                    content, mine[i, j], size = q, q, size + 20 * 8
                else:
                    kept = np.argsort(-abs(q - mine[i, j]))[:4]
                    content = zero.copy()
                    content[kept] = (q - mine[i, j])[kept]
                    mine[i, j], size = mine[i, j] + content, size + 4 * 8 + 3
                post[i, j], sent = (content, "whole" if whole else "part", number[i, j], lacks[i, j]), sent + 1
            else:
                post[i, j], size = (None, "", number[i, j], lacks[i, j]), size + 1
        for i, j in (arc for arc, came in zip(arcs, arrives) if came):  # the owner of arc (i, j) reads what j sent
            content, kind, its_number, _ = post[j, i]
            if kind == "whole" or (kind == "part" and its_number == applied[i, j] + 1):
                theirs[i, j] = content if kind == "whole" else theirs[i, j] + content
                applied[i, j] = its_number
            if applied[i, j] == its_number:
                z[i, j] = (1 - relax) * z[i, j] + relax * theirs[i, j]
            lacks[i, j] = int(applied[i, j] < its_number)
        for n, (i, j) in enumerate(arcs):
            if post[i, j][1] == "whole":
                asked[i, j] = 0
            elif arrives[n]:
                asked[i, j] = post[j, i][3]
        np.testing.assert_allclose(expected, x, atol=1e-9, rtol=0)
        assert communications == sent and counted == size


def test_broadcasts_that_are_compressed_must_arrive(setting):
    for messages in ({"bits": 8, "loss": 0.1}, {"trigger": 0.1, "delay": 1}):
        with pytest.raises(caden.CadenError, match="must all arrive"):
            caden.simulate(methods.gt(), *setting, 1, messages=messages)


def test_mu_z_auto_is_much_the_same_with_and_without_copies(setting):
    """16 bits change little; the residuals of arcs, also agreed on by max-consensus, differ from those of agents."""
    runs = [
        caden.simulate(methods.caden(), *setting, 120, local_steps=10, messages=messages)
        for messages in (None, {"bits": 16})
    ]
    penalties = [run.summary()["mu_z"] for run in runs]
    assert penalties[0] == pytest.approx(penalties[1], rel=0.3)
    assert all(run.rows[-1]["relative_error"] < 1e-9 for run in runs)


@pytest.mark.parametrize(
    "messages", [{"bits": 3}, {**DECAYING, "top": 0.3}, {"loss": 0.2, "bits": 3, **DECAYING}], ids=str
)
def test_a_run_with_copies_resumes_to_the_same_bytes(setting, tmp_path, messages):
    problem, graph = setting
    options = {"participation": 0.6, "messages": messages}
    whole = caden.simulate(methods.caden(0.4), problem, graph, 12, **options)
    kept = {"directory": tmp_path / "r", "checkpoint_every": 3}

    def stop(row, state):
        return row["round"] == 7

    caden.simulate(methods.caden(0.4), problem, graph, 12, callbacks=[stop], **kept, **options)
    rest = caden.simulate(methods.caden(0.4), problem, graph, 12, resume=True, **kept, **options)
    assert torch.equal(rest.x, whole.x) and rest.rows[-1]["bytes"] == whole.rows[-1]["bytes"]


def test_offers_are_differences_to_what_a_neighbour_has():
    """Skipped versions, a reply that is lost, a restart: both ends agree again, by a whole row where they must."""
    codec, rng = Codec(top=0.2), np.random.default_rng(0)
    offers, row, have = Offers(True, codec, 30), torch.zeros(32, dtype=torch.float64), {}
    for version in range(1, 40):
        row = row + torch.tensor(rng.normal(size=32))
        offers.add(version, {7: row})
        if version % 3 == 0:
            continue  # the neighbour is slow, and skips this one
        base = max(have, default=-1)
        offer = offers.answer(7, -1, base, 0)
        assert offer.version == version
        if version in (10, 11):
            continue  # the reply is lost, twice; the next is asked for with the old base
        assert offer.base == base
        have = {version: row if offer.base < 0 else apply_difference(have[base], offer.data, codec, 30)}
        assert torch.equal(have[version][30:], row[30:])  # what travels along is never compressed
        assert torch.equal(offers._copies[7][version], have[version])
        if version == 20:  # the owner restarts
            saved, offers = offers.buffers(), Offers(True, codec, 30)
            offers.restore(saved)
            again = offers.answer(7, -1, 17, 0)
            assert again.base == -1 and torch.equal(again.data, row)
            have = {version: row}
    assert offers.answer(7, -1, version, 0).data.numel() == 0  # nothing newer
    settled = {38: have[38]} if 38 in have else have
    for later in range(40, 80):  # the row no longer changes, so the copy becomes exact
        offers.add(later, {7: row})
        base = max(settled)
        offer = offers.answer(7, -1, base, 0)
        settled = {later: apply_difference(settled[base], offer.data, codec, 30)}
    torch.testing.assert_close(settled[79], row, atol=1e-12, rtol=0)


def test_the_newest_row_of_a_silent_arc_is_kept():
    offers = Offers(True, None, 4)
    offers.add(1, {2: torch.ones(4), 3: torch.ones(4)})
    for version in range(2, 9):
        offers.add(version, {3: torch.zeros(4)})
    assert offers.answer(2, -1, -1, 0).version == 1 and offers.answer(3, -1, -1, 0).version == 8
    assert len(offers.buffers()) == 3
