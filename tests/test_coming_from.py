"""The guides for those who come from elsewhere: they show the files' own lines, and the files do what they say."""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stretto
from helpers.code_lines import count_code_lines
from helpers.output import without_gloo_lines
from stretto.data import prepare_text
from stretto.launch.rank_environment import free_port

ROOT = Path(__file__).parents[1]
FILES = ROOT / "examples" / "coming_from"
GUIDES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
SECONDS = 200


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the guides' data, in which they are followed."""
    folder = tmp_path_factory.mktemp("coming_from")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path(str(FILES / "make_data.py"))
    return folder


def start(folder: Path, *command: str, python: str = sys.executable, **variables: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    return subprocess.Popen(
        [python, *command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]") -> str:
    printed, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said[-3000:]
    return without_gloo_lines(printed)


def on_two_ranks(folder: Path, script: str) -> str:
    """What the first of two ranks prints, which are started as torchrun would, but sooner; the other says nothing."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        start(folder, script, PYTHONWARNINGS="error", RANK=str(rank), LOCAL_RANK=str(rank), **world)
        for rank in range(2)
    ]
    first, second = [finish(rank) for rank in ranks]
    assert second == ""
    return first


def alone(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a script prints on one rank, in this process and folder."""
    capsys.readouterr()
    runpy.run_path(str(FILES / name))
    return capsys.readouterr().out


def function(name: str, function_name: str) -> Callable[..., Any]:
    """A function of a script, which is not run as such; `spawn` sends it to ranks by value."""
    found: Callable[..., Any] = runpy.run_path(str(FILES / name))[function_name]
    return found


def losses(printed: str) -> list[float]:
    found = [float(loss) for loss in re.findall(r"loss (?:of rank 0 )?([\d.]+)", printed)]
    assert found, printed
    return found


def shown(page: Path) -> list[tuple[str, list[str]]]:
    """The pieces of files that a page shows, each with the name of its file."""
    pattern = r"^<!-- examples/coming_from/(\S+) -->\n```py\n(.*?)^```"
    found = re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)
    return [(name, code.splitlines()) for name, code in found]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_guide_shows_lines_of_its_files(page: Path) -> None:
    pieces = shown(page)
    assert {name.split("_")[1] for name, _ in pieces} == {"before.py", "after.py"}
    assert page.read_text().count("```py\n") == len(pieces)
    for name, lines in pieces:
        whole = (FILES / name).read_text().splitlines()
        assert any(whole[first : first + len(lines)] == lines for first in range(len(whole))), name


def test_links_to_threads_have_the_form_that_leads_to_them() -> None:
    pattern = r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+"
    for page in GUIDES:
        links = re.findall(r"\]\((https?://[^)]*)\)", page.read_text())
        assert links and all(re.fullmatch(pattern, link) for link in links), links


@pytest.mark.long
@pytest.mark.short
def test_a_hand_written_ddp_script_and_its_successor_have_equal_losses_at_every_step(data: Path) -> None:
    printed = finish(start(data, str(FILES / "ddp_compare.py"), PYTHONWARNINGS="error"))
    lines = re.findall(r"^step \d+  before ([\d.]+)  after ([\d.]+)$", printed, re.MULTILINE)
    assert len(lines) == 20
    for before, after in lines:
        assert float(after) == pytest.approx(float(before), rel=1e-5)
    assert float(lines[-1][1]) < 0.3 * float(lines[0][1]), "it learns"
    assert not (data / "ddp.pt").exists() and not (data / "ddp").exists(), "a second run would resume from them"


def test_one_more_line_in_the_ddp_script_leaves_its_losses_as_they_are(data: Path, tmp_path: Path) -> None:
    script = (FILES / "ddp_before.py").read_text()
    line = "DistributedDataParallel(Model())"
    assert script.count(line) == 1
    shared = script.replace(line, "DistributedDataParallel(stretto.parallelize(Model(), Layout(2, 4)))")
    shared = "import stretto\nfrom stretto.parallel import Layout\n" + shared
    (tmp_path / "texts.jsonl").write_bytes((data / "texts.jsonl").read_bytes())
    printed = []
    for name, text in (("before", script), ("after", shared)):
        (tmp_path / f"{name}.py").write_text(text)
        printed.append(finish(start(tmp_path, f"{name}.py")))
        (tmp_path / "ddp.pt").unlink(missing_ok=True)
    assert printed[0] == printed[1] and printed[0].count("loss") == 4


def test_the_successor_of_the_ddp_script_has_at_most_half_its_lines() -> None:
    before, after = (count_code_lines(FILES / f"ddp_{part}.py") for part in ("before", "after"))
    assert 2 * after <= before
    page = (ROOT / "docs" / "coming-from" / "ddp.md").read_text()
    assert f"{after} lines of code instead of {before}" in page


@pytest.mark.long
@pytest.mark.short
def test_two_stages_have_the_losses_of_a_layer_on_each_device(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(data)
    before = losses(alone("layers_before.py", capsys))
    after = stretto.spawn(function("layers_after.py", "train"), ranks=2)[0]
    assert len(before) == 10 and after == pytest.approx(before, rel=1e-5)
    # The figures that the guide shows.
    page = (ROOT / "docs" / "coming-from" / "layer-per-gpu.md").read_text()
    assert all(f"| {step} | {before[step - 1]:.5f} | {before[step - 1]:.5f} |" in page for step in (1, 5, 10)), before


def test_arrays_are_fitted_as_by_keras(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    loss, predictions, y = fit_arrays()
    assert loss < 0.25 * y.var()
    assert np.square(predictions - y).mean() == pytest.approx(loss, rel=1e-5)


@pytest.mark.peers
def test_keras_itself_fits_the_arrays_about_as_well(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = peer("STRETTO_TENSORFLOW_PYTHON")
    (before,) = losses(finish(start(data, str(FILES / "keras_before.py"), python=python, TF_CPP_MIN_LOG_LEVEL="3")))
    monkeypatch.chdir(data)
    after, _, y = fit_arrays()
    assert before < 0.25 * y.var() and after < 1.5 * before


def fit_arrays() -> tuple[float, Any, Any]:
    """The validation loss and predictions of keras_after.py on one rank, and the targets."""
    with np.load("series.npz") as series:
        parts = [array[rows] for rows in (slice(192), slice(192, None)) for array in (series["x"], series["y"])]
    loss, predictions = function("keras_after.py", "fit")(*parts)
    return loss, predictions, parts[-1]


@pytest.mark.long
def test_two_workers_of_tf_config_have_the_losses_of_one(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(data)
    one = losses(alone("tf_after.py", capsys))
    workers = [start(data, str(FILES / "tf_after.py"), TF_CONFIG=config) for config in tf_configs()]
    first, second = [finish(worker) for worker in workers]
    assert len(one) == 10 and losses(first) == pytest.approx(one, rel=1e-4) and second == ""


@pytest.mark.peers
def test_keras_refuses_what_the_guide_says_it_refuses(data: Path) -> None:
    python = peer("STRETTO_TENSORFLOW_PYTHON")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    before = str(FILES / "tf_before.py")
    workers = [start(data, before, python=python, TF_CONFIG=config, **quiet) for config in tf_configs()]
    said = [worker.communicate(timeout=SECONDS)[1] for worker in workers]
    assert all("PerReplica" in text and worker.returncode for text, worker in zip(said, workers, strict=True)), said


@pytest.mark.peers
def test_lanes_have_the_losses_of_lightning_on_one_device_and_keep_them_on_two(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = peer("STRETTO_LIGHTNING_PYTHON")
    before = str(FILES / "lightning_before.py")
    printed = finish(start(data, before, python=python))
    one = losses(printed)
    continuing = r"batch (\d): (\d+) of 16 streams continue"
    assert re.findall(continuing, printed)[1:] == [(str(batch), "16") for batch in range(1, 5)]
    # On two devices a sampler deals batches in a shuffled order: the state is carried into another part of the text.
    found = re.findall(continuing, finish(start(data, before, "2", python=python)))
    assert len(found) == 3 and min(int(streams) for _, streams in found[1:]) < 8
    monkeypatch.chdir(data)
    assert train_on_lanes(1) == pytest.approx(one, rel=1e-4)
    assert train_on_lanes(2) == pytest.approx(one, rel=1e-4)


@pytest.mark.long
def test_lanes_have_the_same_losses_on_one_rank_and_on_two(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    one = train_on_lanes(1)
    assert len(one) == 10 and one[-1] < one[0]
    assert train_on_lanes(2) == pytest.approx(one, rel=1e-4)


def train_on_lanes(ranks: int) -> list[float]:
    if not Path("data/book").exists():
        prepare_text(["book.txt"], "data/book")
    train = function("lightning_after.py", "train")
    result: list[float] = train() if ranks == 1 else stretto.spawn(train, ranks=ranks)[0]
    return result


def peer(variable: str) -> str:
    """The Python that has a peer installed, which an environment variable names."""
    if variable not in os.environ:
        pytest.skip(f"set {variable} to a Python that has it")
    return os.environ[variable]


def tf_configs() -> list[str]:
    cluster = {"worker": [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]}
    return [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}) for index in range(2)]
