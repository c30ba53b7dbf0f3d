"""What a fault costs a run: the steps that it repeats, and the time until it takes a new one; for docs/faults.md."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE_VARIABLE = "STRETTO_FAULTS_TABLE"
"""Set to the path of a file, it makes tests append what their faults have cost; tests/faults_page.py reads it."""


@dataclass(frozen=True)
class FaultLoss:
    """The cost of one fault."""

    steps: int  # steps that were in the log, and had to be repeated
    seconds: float | None  # from the fault until the log had a step that it did not have before; None: not measured


class FaultMeter:
    """Measures the cost of a fault from the log of a run. Make one when the run takes no more steps because of it."""

    def __init__(self, folder: Path, fault_time: float | None = None) -> None:
        self._log = folder / "log.jsonl"
        self.time = time.monotonic() if fault_time is None else fault_time
        lines = list(log_lines(self._log))
        self.last_step = _last_step(lines)
        self._generation = _last_start(lines)["generation"]

    def num_lost_steps(self) -> int:
        """Return how many steps the run has repeated since the fault, or will repeat."""
        last_start = _last_start(list(log_lines(self._log)))
        return max(0, self.last_step - last_start["step"]) if last_start["generation"] > self._generation else 0

    def await_progress(self, seconds: float = 120, *, after_change: bool = False) -> FaultLoss:
        """Wait until the run has taken a step that it had not taken before the fault; return the cost.

        If the fault ends a rank, count `after_change` of ranks only: the others may finish the step under way.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            lines = list(log_lines(self._log))
            last_start = _last_start(lines)
            if last_start["generation"] > self._generation:
                lines = lines[lines.index(last_start) :]
            elif after_change:
                self.last_step = _last_step(lines)
            if _last_step(lines) > self.last_step:
                return FaultLoss(self.num_lost_steps(), time.monotonic() - self.time)
            time.sleep(0.02)
        raise AssertionError(f"the run took no step after step {self.last_step} within {seconds} s")


@dataclass(frozen=True)
class LossRecorder:
    """Appends what the faults of a test have cost to the file that TABLE_VARIABLE names, if it is set."""

    test: str

    def __call__(self, loss: FaultLoss) -> None:
        """Record the cost of one fault."""
        path = os.environ.get(TABLE_VARIABLE)
        if path:
            line = {"test": self.test, "steps_lost": loss.steps, "seconds_lost": loss.seconds}
            with Path(path).open("a", encoding="utf-8") as table:
                table.write(json.dumps(line) + "\n")


def log_lines(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log that are complete; none if the log does not exist."""
    with suppress(FileNotFoundError):
        for line in log.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def logged_losses(folder: Path) -> dict[int, float]:
    """Return the losses in the log of a run, by step; each step must be in it once, in order."""
    steps = [line for line in log_lines(folder / "log.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return {line["step"]: line["loss"] for line in steps}


def logged_steps(folder: Path) -> list[int]:
    """Return the steps in the log of a run, in the order of its lines."""
    return [line["step"] for line in log_lines(folder / "log.jsonl") if line["kind"] == "step"]


def _last_step(lines: list[dict[str, Any]]) -> int:
    return max((line["step"] for line in lines if line["kind"] == "step"), default=0)


def _last_start(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the line of the last launch in a log, with the step that it resumed from."""
    starts = [line for line in lines if line["kind"] == "start"]
    return max(starts, key=lambda line: int(line["generation"]), default={"generation": 0, "step": 0})
