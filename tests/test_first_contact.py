"""The first ten minutes: help without waiting, clear words for wrong calls, notebooks, pictures, one word per thing."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from safetensors.torch import load_file
from torch import nn

import caden
from caden.engine.figures import styles
from caden.errors import CadenError

ROOT = Path(__file__).parents[1]


# The command line without torch.


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "Decentralized optimization"),
        (["run", "--help"], 0, "--dry-run"),
        (["fleet", "--help"], 0, "init"),
        (["--version"], 0, caden.__version__),
        (["run", "--rounds", "3"], 2, "No such option"),
        (["rum"], 2, "rum"),
        (["bench", "--repeats", "few"], 2, "valid integer"),
        (["bench", "often"], 2, "known: many, million, networks, paper, small"),
        (["list", "colours"], 2, "Unknown kind"),
        (["list", "graphs", "--check"], 2, "--check"),
        (["tune"], 2, "METHOD"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_usage_errors_do_not_load_torch(arguments, code, words):
    probe = "import sys\nfrom caden.cli import main\nsys.argv = ['caden', *{!r}]\ntry:\n    main()\n"
    probe += "finally:\n    assert not {{'torch', 'numpy', 'pandas', 'matplotlib'}} & set(sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", probe.format(arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    if code:
        assert done.stderr.startswith("caden: ") and done.stderr.count("\n") == 1, done.stderr


def test_the_command_without_arguments_prints_its_help():
    done = subprocess.run([sys.executable, "-m", "caden"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "Usage: caden" in done.stdout + done.stderr


def test_shell_completion_is_there():
    from typer.main import get_command

    from caden.cli import app

    options = {name for parameter in get_command(app).params for name in parameter.opts}
    assert {"--install-completion", "--show-completion", "--version"} <= options


@pytest.mark.parametrize(
    "setting",
    ["rounds=-3", "participation=2", "local_steps=-1", "target=7", "record_every=0", "warmup.steps=-1", "tolerance=0"],
)
def test_parameters_are_checked_before_data_are_read(setting, monkeypatch):
    from caden.experiments.config import experiment

    monkeypatch.setattr("caden.data.load", lambda name: pytest.fail("data were read"))
    with pytest.raises(CadenError, match=setting.partition("=")[0].rpartition(".")[2]):
        experiment(None, [setting])


# Calls with the wrong objects.


@pytest.fixture(scope="module")
def small():
    return caden.problems.quadratic(agents=5, dim=3, seed=0), caden.graphs.ring(5)


def test_wrong_objects_get_one_clear_line(small):
    problem, graph = small
    method = caden.methods.caden(mu_z=1.0)
    for arguments, message in [
        ((caden.methods.caden, problem, graph), "call it, as in `caden.methods.caden()`"),
        (("caden", problem, graph), "use `caden.methods.caden()`"),
        ((3, problem, graph), "`method` must be a Method, got int"),
        ((method, graph, problem), "simulate(method, problem, graph)"),
        ((method, nn.Linear(2, 2), graph), "caden.problems.classification"),
        ((method, problem, "ring"), "caden.graphs.ring(20)"),
        ((method, object(), graph), "is not a problem"),
        ((method, problem, np.ones((2, 3))), "must be square"),
        ((method, problem, np.triu(np.ones((5, 5)), 1)), "not symmetric"),
    ]:
        with pytest.raises(CadenError) as caught:
            caden.simulate(*arguments, rounds=1)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_graphs_of_other_libraries_are_accepted(small):
    problem, graph = small
    method = caden.methods.gt(0.1)
    expected = caden.simulate(method, problem, graph, rounds=3).x
    for other in (graph.to_networkx(), graph.adjacency, sp.csr_array(graph.adjacency), nx.cycle_graph(5)):
        assert torch.equal(caden.simulate(method, problem, other, rounds=3).x, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("make", [caden.problems.quadratic, caden.problems.logistic])
def test_a_missing_device_is_one_line(make):
    with pytest.raises(CadenError, match="`device` 'cuda' is not available here"):
        make(device="cuda")
    data = torch.rand(8, 2), torch.arange(8) % 2
    with pytest.raises(CadenError, match="not available here"):
        caden.problems.classification(nn.Linear(2, 2), data, agents=2, device="cuda")


def test_dictionaries_that_a_model_does_not_take_are_one_line():
    with pytest.raises(CadenError, match="unexpected keyword argument 'pixels'"):
        caden.problems.classification(nn.Linear(2, 2), ({"pixels": torch.rand(8, 2)}, torch.arange(8) % 2), agents=2)


# Results and their pictures.


@pytest.fixture(scope="module")
def digits():
    train, test = caden.data.load("digits")
    model = caden.problems.mlp(inputs=64, outputs=10, hidden=8)
    train, test = (train[0][:200], train[1][:200]), (test[0][:100], test[1][:100])
    problem = caden.problems.classification(model, train, test, agents=4)
    return caden.simulate(caden.methods.caden(), problem, caden.graphs.ring(4), rounds=3, target=0.5)


def test_short_representations(small, digits):
    problem, graph = small
    assert repr(graph) == "Graph(ring: 5 agents, 5 edges)"
    assert repr(problem) == "Quadratic(agents 5, dimension 3, dtype float64)"
    assert repr(caden.methods.gt(0.2)) == "gt(alpha=0.2, form='atc')"
    assert "mu_z='auto'" in repr(caden.methods.caden()) and "local='lbfgs'" in repr(caden.methods.caden())
    assert re.fullmatch(r"Result\(4 agents, 3 rounds, accuracy [\d.]+%, stopped by rounds\)", repr(digits))
    for thing in (problem, graph, caden.methods.caden(), digits):
        assert thing._repr_html_().startswith(("<table>", "<svg"))
        assert "<script" not in thing._repr_html_()


def test_every_method_has_a_short_representation():
    for name, factory in caden.methods.METHODS.items():
        text = repr(factory(**caden.methods.CARDS[name].unit_parameters))
        assert text.startswith(f"{name}(") and len(text) < 150 and "<function" not in text


def test_a_plot_is_a_figure_and_a_picture(digits):
    figure = digits.plot()
    titles = [axis.get_title() for axis in figure.axes if axis.get_visible()]
    assert "mean test accuracy" in titles and len(titles) >= 5
    assert figure._repr_png_().startswith(b"\x89PNG")
    one = digits.plot("accuracy", x="communications")
    assert [axis.get_xlabel() for axis in one.axes] == ["communications"]
    with pytest.raises(CadenError, match="did you mean 'accuracy'"):
        digits.plot("acuracy")
    with pytest.raises(CadenError, match="known: "):
        digits.plot("accuracy", x="time of day")


def test_the_models_of_single_agents(digits):
    vector = torch.cat([p.detach().flatten() for p in digits.module(agent=3).parameters()])
    assert torch.equal(vector, digits.x[3])
    with pytest.raises(CadenError, match=r"0\.\.3, got 4"):
        digits.module(agent=4)


def test_saved_models_load_into_the_users_module(small, digits, tmp_path):
    digits.save(tmp_path / "own.safetensors", agent=1)
    run = caden.simulate(
        caden.methods.caden(mu_z=0.1), digits.problem, caden.graphs.ring(4), rounds=1, directory=tmp_path / "run"
    )
    files = {tmp_path / "own.safetensors": digits.module(agent=1), tmp_path / "run" / "model.safetensors": run.module()}
    for file, expected in files.items():
        model = caden.problems.mlp(inputs=64, outputs=10, hidden=8, seed=9)
        model.load_state_dict(load_file(file))
        for name, tensor in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor)
    no_model = caden.simulate(caden.methods.gt(0.1), *small, rounds=1)
    with pytest.raises(CadenError, match=r"nn\.Module"):
        no_model.save(tmp_path / "none.safetensors")


def test_colours_do_not_depend_on_the_order():
    labels = ["gt", "caden", "adapd", "caden_gd"]
    assert styles(labels) == styles(sorted(labels))
    assert len(set(styles([f"m{i}" for i in range(28)]).values())) == 28
    assert styles(labels)["caden"][0] == "#0072b2"


NOTEBOOK = """
import caden
problem, graph = caden.problems.quadratic(agents=5, dim=3), caden.graphs.ring(5)
---
graph
---
problem
---
result = caden.simulate(caden.methods.caden(mu_z=1.0), problem, graph, rounds=4)
---
result
---
result.plot("relative_error")
"""


def test_a_notebook_shows_a_bar_tables_the_graph_and_a_plot(tmp_path):
    pytest.importorskip("ipykernel")
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(text.strip()) for text in NOTEBOOK.split("---")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    _, graph, problem, run, result, plot = [cell.outputs for cell in notebook.cells]
    assert "<svg" in graph[0].data["text/html"]
    assert "dimension" in problem[0].data["text/html"]
    bar = [output.data["text/html"] for output in run if "data" in output]
    assert len(bar) == 1 and "<progress value='4' max='4'" in bar[0] and "communications" in bar[0]
    assert "relative error" in result[0].data["text/html"]
    assert plot[0].data["image/png"]


# One word per thing.

FORBIDDEN = {
    r"vectors sent|\} msg\b": "communications",
    r"foretell|foretold": "estimate",
    r"goes? on with|gone on with|\bgoes on\b": "resume, continue",
    r"nothing speaks against": "no problem found with",
    r"What is there": "Features",
    r"stand that\b": "tolerate",
    r"exists already": "already exists",
    r"of which no news": "silent",
}


def texts():
    """Every page and every string and comment of the package."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md")]
    yield from ((page, page.read_text()) for page in pages)
    yield from ((file, file.read_text()) for file in ROOT.glob("src/caden/**/*.py"))


def test_one_word_per_thing():
    offences = [
        f"{file.relative_to(ROOT)}: {match.group()!r}, say {word!r}"
        for file, text in texts()
        for pattern, word in FORBIDDEN.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert offences == []


def test_no_local_is_called_found_or_place():
    named = re.compile(r"^\s+(found|place)\b.*=[^=]", re.MULTILINE)
    assert [str(file) for file in ROOT.glob("src/caden/**/*.py") if named.search(file.read_text())] == []


def test_public_functions_explain_their_parameters():
    """Everything that a newcomer calls says what its parameters mean."""
    for function in (caden.simulate, caden.compare, caden.problems.classification, caden.problems.logistic):
        doc = inspect.getdoc(function)
        for name in inspect.signature(function).parameters:
            named = name in ("dtype", "device", "agents", "dim", "samples", "seed") or f"{name}" in doc
            assert named or any(name in inspect.getdoc(g) for g in (caden.Conditions, caden.Stopping, caden.Saving)), (
                name
            )


def test_json_listing_names_everything():
    done = subprocess.run(
        [sys.executable, "-m", "caden", "list", "--json"], capture_output=True, text=True, timeout=120, check=True
    )
    kinds = json.loads(done.stdout)
    assert {"methods", "problems", "graphs", "solvers"} <= set(kinds) and "caden" in kinds["methods"]
