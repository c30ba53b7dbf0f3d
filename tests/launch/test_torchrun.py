"""How long torchrun waits for ranks that save after SIGTERM."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig

DOCS = Path(__file__).parents[2] / "docs" / "how-to"
VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
needs_timeout = pytest.mark.skipif(
    "shutdown_timeout" not in LaunchConfig.__dataclass_fields__, reason="torchrun waits 30 s before torch 2.12"
)


def test_each_complete_recipe_for_torchrun_gives_ranks_more_time_to_save() -> None:
    pages = [path.read_text() for path in DOCS.glob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"^```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)]
    # One with `...` is not complete; its page refers to one that is.
    recipes = [block for block in blocks if "torchrun --nnodes" in block and " ... " not in block]
    assert len(recipes) == 2
    for recipe in recipes:
        seconds = re.search(rf"{VARIABLE}=(\d+)", recipe)
        assert seconds is not None and int(seconds[1]) > 30, recipe


@needs_timeout
def test_torchrun_waits_as_long_as_the_variable_says(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(
        "import pathlib, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()\ntime.sleep(120)\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "1",
        "--master-port",
        "0",
        str(script),
    ]
    with subprocess.Popen(command, env={**os.environ, VARIABLE: "1"}, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        process.wait(60)
    assert time.monotonic() - started < 20, f"torch {torch.__version__} waits for longer"
