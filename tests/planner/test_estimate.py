"""The planner's estimates: the slots of each layout, the page that shows them, and the command for a module."""

from pathlib import Path

import pytest
from torch import nn

from pays_page import PAGE, with_tables
from stretto.cli.main import main
from stretto.parallel.layout import LOCAL, Layout
from stretto.planner.estimate import Estimator, Work
from stretto.planner.gpus import Assumption, Gpu


@pytest.mark.parametrize(
    ("layout", "cells"),
    [
        (LOCAL, 32 + 4 - 1),  # cuDNN's layers run side by side
        (Layout(2, 8), (8 + 2 - 1) * 4 * 2),  # slots, time steps of a chunk, layers
        (Layout(stages=[1, 3], chunks=8), (8 + 2 - 1) * 4 * 3),
        (LOCAL, 32 * 4),  # bidirectional from here on: both ways side by side
        (Layout(spans=2), 2 * 4 * 16),  # slots of each layer, layers, half of the window
    ],
    ids=str,
)
def test_a_layout_takes_the_launches_of_its_slots(layout: Layout, cells: int, request: pytest.FixtureRequest) -> None:
    is_bidirectional = request.node.callspec.indices["layout"] > 2
    work = Work(nn.LSTM(8, 8, 4, bidirectional=is_bidirectional, device="meta"), 4, 32, 2, "bf16")
    # A GPU whose only cost is a second per launch.
    only_launches = Assumption(1.0, 1.0, 1.0, latency=0.0, bandwidth=1e30, host=0.0, guard=0.0)
    gpu = Gpu({"bf16": 1e30}, 1e30, 1e30, "")
    seconds = Estimator(work, gpu, only_launches).seconds(layout, work.layers(layout))
    assert seconds == pytest.approx(2 * cells)  # forward and backward


def test_the_tables_of_the_page_are_the_estimates_of_today() -> None:
    assert PAGE.read_text() == with_tables(PAGE.read_text()), "run: python tests/pays_page.py"


def test_a_module_is_planned_without_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    assert nn.Linear(10**6, 10**6).weight.is_meta\n"
        "    return nn.ModuleDict({'lstm': nn.LSTM(4096, 4096, 4), 'head': nn.Linear(4096, 50)})\n"
    )
    options = ["--rows", "1", "--steps", "512", "--devices", "2", "--hardware", "h100"]
    assert main(["plan", "my_model.py:build", *options]) == 0
    said = capsys.readouterr().out
    assert "lstm" in said and "2 stages" in said and "faster" in said and "each" in said
    assert main(["plan", "my_model.py:build", *options, "--link", "string"]) == 2
    assert "--link=string is not known; choose from nvlink3" in capsys.readouterr().err
