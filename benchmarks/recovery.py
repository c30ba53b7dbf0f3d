"""What a lost replica costs: `run.recovery = "live"` against a restart, and what the copies of lanes cost each step.

    python benchmarks/recovery.py [--quick]

Runs of `stretto train` take turns: one of two replicas is killed (SIGKILL) in the middle of the run, with live recovery
and with a restart from the newest checkpoint; and a run without a fault. The last rank is killed, or rank 0, which
writes the log, in turns. Seconds are counted from the SIGKILL to the end of the next step that is new. `run.timeout` is
2 s. Then two ranks take single steps with and without copies of the lanes, in turns: `overhead_of_copies` is the median
over pairs of steps, with bounds of 95 % confidence.
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

from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.data import Corpus, Lanes, prepare_text
from stretto.measure.timing import median_bounds
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack
from timing import WIKITEXT, parse_quick, show

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.rank_pool import RankPool

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
_WARM_UP_PAIRS = 5


@dataclass(frozen=True)
class Outcome:
    """What the log of a run shows."""

    step_seconds: float
    seconds_lost: float = 0.0
    steps_lost: int = 0


def train(folder: Path, data: Path, recovery: str, *, victim: int | None) -> Outcome:
    """Train a run, kill a rank (an index among all of them) unless it is None, and watch the log."""
    config = folder / "run.toml"
    config.write_text(CONFIG.format(data=data, steps=STEPS))
    run_folder = Path(tempfile.mkdtemp(dir=folder))
    command = [
        sys.executable, "-m", "stretto", "train", str(config), "--run.folder", str(run_folder),
        "--run.recovery", recovery,
    ]  # fmt: skip
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
        if victim is not None and not killed_at and step >= KILLED_AT:
            time.sleep(0.4 * statistics.median(b[0] - a[0] for a, b in pairwise(times[-20:])))
            killed_step = last_step(run_folder / "log.jsonl")
            pid = ranks_of(process.pid)[victim]
            killed_at = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    assert process.returncode == 0 and times[-1][1] == STEPS, "the run must end"
    before = [later[0] - earlier[0] for earlier, later in pairwise(times) if later[1] <= KILLED_AT]
    step_seconds = statistics.median(before)
    if victim is None:
        return Outcome(step_seconds)
    next_step = next(when for when, step in times if when > killed_at and step > killed_step)
    # The step that was under way is taken again, too.
    return Outcome(step_seconds, next_step - killed_at, killed_step - min(lowest, killed_step) + 1)


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


def copy_overhead(world: World, data: Path, num_pairs: int) -> list[float]:
    """Return how many times as long a step with copies of lanes takes as one without, in each of several pairs."""
    model = Stack([Embedding(256, 256), LSTM(256, 256), LSTM(256, 256), Linear(256, 256)])
    engine = make_engine(model, CrossEntropy(), Layout(replicas=2), world, seed=1)
    trainer = Trainer(engine, Lanes(Corpus.open(data), 16, 64), TrainConfig(steps=10**6))
    trainer.copy_lanes()
    lane_copy, ratios = trainer.lane_copy, []
    for index in range(num_pairs + _WARM_UP_PAIRS):
        seconds = {}
        # The same trainer with and without copies: two trainers differ in speed, by where their memory happens to be.
        # Single steps in turns, because the speed of the cores changes within a second.
        for has_copies in (False, True) if index % 2 else (True, False):
            trainer.lane_copy = lane_copy if has_copies else None
            started = time.perf_counter()
            trainer.advance()  # all ranks end a step together
            seconds[has_copies] = time.perf_counter() - started
        ratios.append(seconds[True] / seconds[False])
    return ratios[_WARM_UP_PAIRS:]


def main() -> None:
    is_quick = parse_quick(__doc__ or "")
    live, restart, plain = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_text([WIKITEXT / "valid.txt"], folder / "data")
        console = Console(stderr=True)
        for index in track(range(2 if is_quick else 4), "runs", console=console, transient=True):
            victim = 0 if index % 2 else -1
            live.append(train(folder, folder / "data", "live", victim=victim))
            if is_quick and index:
                continue
            restart.append(train(folder, folder / "data", "restart", victim=victim))
            plain.append(train(folder, folder / "data", "live", victim=None))
        pool = RankPool(2)
        ratios = pool.run(copy_overhead, folder / "data", 100 if is_quick else 2000, seconds=600)[0]
        pool.close()
    rows = [
        [
            kind,
            f"{statistics.median(outcome.step_seconds for outcome in outcomes) * 1e3:.0f}",
            *(
                ["", "", ""]
                if kind == "no fault"
                else [
                    f"{statistics.median(outcome.seconds_lost for outcome in outcomes):.2f}",
                    f"{max(outcome.seconds_lost for outcome in outcomes):.2f}",
                    str(max(outcome.steps_lost for outcome in outcomes)),
                ]
            ),
        ]
        for kind, outcomes in (("live", live), ("restart", restart), ("no fault", plain))
    ]
    at_least, at_most = median_bounds(ratios)
    show(
        "one of two replicas is killed",
        ["recovery", "ms per step", "seconds lost", "worst", "steps lost"],
        rows,
        {
            "seconds_lost_live": max(outcome.seconds_lost for outcome in live),
            "seconds_lost_restart": statistics.median(outcome.seconds_lost for outcome in restart),
            "steps_lost": max(outcome.steps_lost for outcome in live),
            "steps_lost_restart": max(outcome.steps_lost for outcome in restart),
            "overhead_of_copies": statistics.median(ratios) - 1,
            "overhead_of_copies_at_least": at_least - 1,
            "overhead_of_copies_at_most": at_most - 1,
        },
    )


if __name__ == "__main__":
    main()
