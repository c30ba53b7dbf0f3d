"""Fixtures and settings that the tests of several packages share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

from helpers.fault_loss import LossRecorder
from helpers.rank_pool import RankPools
from helpers.train_process import ReferenceRuns, end_started_runs
from stretto.data import Corpus, TextOptions, prepare_text
from stretto.mesh.join import BACKEND_VARIABLE
from stretto.mesh.strict import STRICT

# A wall-clock deadline per example would fail whenever the machine is busy; pytest's timeout still applies. CI tries
# fewer examples, and shrinks none: in tests with ranks, that takes minutes.
PHASES = [phase for phase in Phase if phase is not Phase.shrink or "CI" not in os.environ]
settings.register_profile("no deadline", deadline=None, max_examples=40 if "CI" in os.environ else 100, phases=PHASES)
settings.load_profile("no deadline")
SHARED = Path(__file__).parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the soak test (`-m soak`)."""
    parser.addoption("--soak-minutes", type=float, default=30.0, help="how long `-m soak` disturbs its run")
    parser.addoption("--soak-seed", type=int, help="of the faults that `-m soak` chooses (default: a new one)")


def pytest_configure(config: pytest.Config) -> None:
    """With `-m strict`, ranks use the strict backend: NCCL's rules on the CPU. W&B is offline, also with a login."""
    os.environ["WANDB_MODE"] = "offline"
    expression = config.option.markexpr
    if "strict" in expression and "not strict" not in expression:
        os.environ[BACKEND_VARIABLE] = STRICT


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses ranks of this file as `strict`; show warnings in tests on a GPU instead of failing."""
    for item in items:
        if {"pools", "reference_runs"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.strict)
        if item.get_closest_marker("gpu") is not None:
            # torch, cuDNN and NCCL have warnings that CI never sees.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    """Worlds for all tests of a file."""
    started = RankPools()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _no_leftover_runs() -> Iterator[None]:
    yield
    end_started_runs()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def wikitext() -> Path:
    """The folder of wikitext-2-small, which lies beside the project and is never part of it."""
    folder = SHARED / "wikitext-2"
    if not folder.is_dir():
        assert "CI" not in os.environ, "CI must have ../shared: a test that is skipped there tests nothing"
        pytest.skip("wikitext-2-small does not lie beside this checkout")
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some text of our own: 400 lines of six words."""
    words = ["the", "stretto", "enters", "before", "the", "theme", "has", "ended", "äther"]
    lines = (" ".join(words[(row * 5 + column * column) % len(words)] for column in range(6)) for row in range(400))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def byte_corpus(text_file: Path) -> Corpus:
    return prepare_text([text_file], text_file.parent / "bytes")[0]


@pytest.fixture(scope="session")
def word_corpus(text_file: Path) -> Corpus:
    return prepare_text([text_file], text_file.parent / "words", TextOptions(level="word"))[0]


@pytest.fixture(scope="session")
def faults_data(wikitext: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus that all disturbed runs train on."""
    folder = tmp_path_factory.mktemp("faults")
    text = folder / "text.txt"
    text.write_text((wikitext / "valid.txt").read_text()[:40_000])
    prepare_text([text], folder / "data", TextOptions(level="byte"))
    return folder / "data"


@pytest.fixture(scope="session")
def reference_runs(faults_data: Path) -> ReferenceRuns:
    return ReferenceRuns(faults_data)


@pytest.fixture
def record_loss(request: pytest.FixtureRequest) -> LossRecorder:
    """Records what a fault has cost, for the table of docs/faults.md."""
    return LossRecorder(request.node.originalname)
