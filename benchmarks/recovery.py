"""What a lost rank costs: seconds from its SIGKILL to the end of the next step that is new.

    python benchmarks/recovery.py [--quick]

`stretto train` runs two replicas. In the middle of the run, the last rank is killed, alternating with rank 0, which
writes the log. All ranks restart from the newest checkpoint; one is saved every 40 steps. `run.timeout` is 2 s.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import track

from stretto.data import prepare_text
from timing import WIKITEXT, parse_quick, show

CONFIG = """
[data]
train = "{data}"
lanes = 16
window = 64
[model]
layers = 2
hidden = 256
[layout]
replicas = 2
[train]
steps = {steps}
[save]
every = 40
minutes = 0
[run]
timeout = 2
log_every = 1000
"""
STEPS, KILLED_AT = 100, 60


@dataclass(frozen=True)
class Outcome:
    """What the log of a run shows."""

    step_seconds: float
    seconds_lost: float
    steps_lost: int


def train(folder: Path, data: Path, victim: int) -> Outcome:
    """Train a run, kill a rank (an index among all of them), and watch the log."""
    config = folder / "run.toml"
    config.write_text(CONFIG.format(data=data, steps=STEPS))
    run_folder = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "stretto", "train", str(config), "--run.folder", str(run_folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    times: list[tuple[float, int]] = []  # when each step was in the log
    killed_at, killed_step = 0.0, 0
    lowest = 10**9  # the lowest step after the kill
    while process.poll() is None:
        step = last_step(run_folder / "log.jsonl")
        if step and (not times or step != times[-1][1]):
            times.append((time.perf_counter(), step))
        if killed_at and step:
            lowest = min(lowest, step)
        if not killed_at and step >= KILLED_AT:
            time.sleep(0.4 * statistics.median(b[0] - a[0] for a, b in pairwise(times[-20:])))
            killed_step = last_step(run_folder / "log.jsonl")
            pid = ranks_of(process.pid)[victim]
            killed_at = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    assert process.returncode == 0 and times[-1][1] == STEPS, "the run must end"
    before = [later[0] - earlier[0] for earlier, later in pairwise(times) if later[1] <= KILLED_AT]
    next_step = next(when for when, step in times if when > killed_at and step > killed_step)
    # The step that was under way is taken again, too.
    return Outcome(statistics.median(before), next_step - killed_at, killed_step - min(lowest, killed_step) + 1)


def last_step(log: Path) -> int:
    """Return the last step in a log; 0 if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if values.get("kind") == "step":
            return int(values["step"])
    return 0


def ranks_of(launcher: int) -> list[int]:
    """Return the process numbers of the ranks that a launcher has started, by rank."""
    ranks = {}
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        variables = dict(
            item.split("=", 1) for item in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in item
        )
        if "RANK" in variables:
            ranks[int(variables["RANK"])] = pid
    return [ranks[rank] for rank in sorted(ranks)]


def main() -> None:
    is_quick = parse_quick(__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_text([WIKITEXT / "valid.txt"], folder / "data")
        kills = track(range(2 if is_quick else 4), "runs", console=Console(stderr=True), transient=True)
        outcomes = [train(folder, folder / "data", 0 if index % 2 else -1) for index in kills]
    show(
        "one of two replicas is killed",
        ["victim", "ms per step", "seconds lost", "steps lost"],
        [
            [
                "rank 0" if index % 2 else "rank 1",
                f"{outcome.step_seconds * 1e3:.0f}",
                f"{outcome.seconds_lost:.2f}",
                str(outcome.steps_lost),
            ]
            for index, outcome in enumerate(outcomes)
        ],
        {
            "median_seconds": statistics.median(outcome.seconds_lost for outcome in outcomes),
            "worst_seconds": max(outcome.seconds_lost for outcome in outcomes),
            "steps_lost": max(outcome.steps_lost for outcome in outcomes),
        },
    )


if __name__ == "__main__":
    main()
