"""LiveView: what a terminal shows while a run trains, in a few rows that fit its size.

step      900/2,000  ━━━━━━━━━━━━━━━━━━━━━━━━━━━─────────────────────────────────  45%  0:03:53 left
loss      2.3412  █▇▅▄▄▃▃▃▂▂▂▂▁▁▁
val loss  2.4101 at step 800   perplexity 11.1351
speed     45,210 tokens/s   212 ms per step   padding 3%
ranks     0 ███████████████████████████░░░  89% busy   412 MB
          1 ██████████████████████████░░░░  86% busy   398 MB
          bubble 12%
lr        9.10e-04   gradient norm 0.42
saved     step 800, 12.3 MB, 21 s ago
plan      predicted 200 ms per step, now 212 ms
failures  2 steps skipped
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from stretto.base.units import format_bytes, format_loss, format_seconds, pluralize
from stretto.checkpoint.background_save import SaveReport
from stretto.train.events import EvaluationReport, Event
from stretto.train.plan_check import PlanReport
from stretto.train.rank_monitor import RankReport
from stretto.train.trainer import StepReport

_LABEL_WIDTH = 10
_MAX_RANKS = 8  # with more ranks, only minimum, mean and maximum are shown
_MIN_BAR_LENGTH, _MAX_BAR_LENGTH = 8, 60  # in characters; the bar of the first row has no maximum
_SPARKLINE_STEPS = 120  # the loss curve shows at most this many recent steps
_SPEED_STEPS, _TIME_LEFT_STEPS = 20, 200  # speed and time left are computed from at most this many recent steps
_BUSY, _WAITING, _DONE, _REMAINING = "cyan", "bright_black", "green", "bright_black"  # colors of bars and curves


@dataclass(frozen=True)
class _Glyphs:
    """The characters of bars and curves."""

    busy: str = "█"
    waiting: str = "░"
    done: str = "━"
    remaining: str = "─"
    levels: str = "▁▂▃▄▅▆▇█"


_UNICODE, _ASCII = _Glyphs(), _Glyphs("#", ".", "#", "-", "_.-=+*#")


class LiveView:
    """The rows shown in this module's docstring; a row appears once its values are known.

    `target_name` names what the model predicts, such as tokens. `step` and `progress` are those at the start of this
    launch; `restarts` counts all launches before it. Rich redraws the rows a few times per second.
    """

    def __init__(
        self,
        num_steps: int | None,
        target_name: str,
        *,
        step: int = 0,
        progress: float = 0.0,
        restarts: int = 0,
    ) -> None:
        self._step_total = "" if num_steps is None else f"/{num_steps:,}"
        self._target_name = target_name
        self._restarts = restarts
        self._step, self._progress = step, progress
        self._started = time.monotonic()
        self._progress_history: deque[tuple[float, float]] = deque([(self._started, progress)], maxlen=_TIME_LEFT_STEPS)
        self._losses: deque[float] = deque(maxlen=_SPARKLINE_STEPS)
        self._recent_steps: deque[StepReport] = deque(maxlen=_SPEED_STEPS)
        self._evaluation_progress: float | None = None
        self._validation: EvaluationReport | None = None
        self._ranks: RankReport | None = None
        self._saved: tuple[float, SaveReport] | None = None
        self._num_failed_saves = 0
        self._num_spikes = 0
        self._plan_report: PlanReport | None = None
        self._ended: float | None = None

    def update(self, event: Event, progress: float) -> None:
        """Record an event; `progress` is the fraction of the run that is done."""
        match event:
            case StepReport():
                self._recent_steps.append(event)
                self._step, self._progress = event.step, progress
                self._num_spikes += event.rewound_to is not None
                self._progress_history.append((time.monotonic(), progress))
                if math.isfinite(event.loss):
                    self._losses.append(event.loss)
            case RankReport():
                self._ranks = event
            case EvaluationReport():
                self._evaluation_progress, self._validation = None, event
            case SaveReport(error=None):
                self._saved = time.monotonic(), event
            case SaveReport():
                self._num_failed_saves += 1
            case PlanReport():
                self._plan_report = event

    def update_evaluation_progress(self, fraction: float) -> None:
        """Record the fraction of an evaluation that is done."""
        self._evaluation_progress = fraction

    def end(self) -> None:
        """Stop the clock, so that the times in the view no longer change."""
        self._ended = time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = _ASCII if options.ascii_only else _UNICODE
        yield from self.rows(options.max_width, console.size.height - 1, glyphs)

    def rows(self, width: int, height: int, glyphs: _Glyphs = _UNICODE) -> list[Text]:
        """Return the most important rows that fit a terminal of this size."""
        rows = self._rows(width, self._rank_rows(width, glyphs), glyphs)
        if len(rows) > height and self._ranks is not None:
            rows = self._rows(width, [self._short_rank_row(width, self._ranks)], glyphs)
        kept = sorted(priority for priority, _ in rows)[:height]
        shown = [row for priority, row in rows if priority in kept]
        for row in shown:
            row.truncate(width, overflow="ellipsis")
        return shown

    def _rows(self, width: int, rank_rows: list[Text], glyphs: _Glyphs) -> list[tuple[int, Text]]:
        """Return the rows from top to bottom, each with a priority; 0 is the most important."""
        rows = [
            (0, self._progress_row(width, glyphs)),
            (1, self._loss_row(width, glyphs)),
            (4, self._validation_row(width)),
            (2, self._speed_row(width)),
            *((10 + index, row) for index, row in enumerate(rank_rows)),  # dropped first, from the bottom
            (6, self._learning_rate_row(width)),
            (5, self._saved_row(width)),
            (7, self._plan_row(width)),
            (3, self._failures_row(width)),
        ]
        return [(priority, row) for priority, row in rows if row is not None]

    def _progress_row(self, width: int, glyphs: _Glyphs) -> Text:
        head, tail = f"{self._step:,}{self._step_total}  ", f"  {self._progress:4.0%}  {self._time_left_or_taken()}"
        length = width - _LABEL_WIDTH - len(head) - len(tail)
        if length < _MIN_BAR_LENGTH:
            return _row(width, "step", [f"{head}{tail.strip()}"])
        bar = _bar(self._progress, length, (glyphs.done, _DONE), (glyphs.remaining, _REMAINING))
        return _label("step").append(head).append_text(bar).append(tail)

    def _time_left_or_taken(self) -> str:
        now = time.monotonic() if self._ended is None else self._ended
        if self._progress >= 1 or self._ended is not None:
            return f"in {_format_clock(now - self._started)}"
        first_time, first_progress = self._progress_history[0]
        last_time, last_progress = self._progress_history[-1]
        if last_progress <= first_progress:
            return "-:--:-- left"
        seconds_per_run = (last_time - first_time) / (last_progress - first_progress)
        # Minus the time since the last step, so that the time left also falls between steps.
        left = seconds_per_run * (1 - last_progress) - (now - last_time)
        return f"{_format_clock(max(left, 0))} left"

    def _loss_row(self, width: int, glyphs: _Glyphs) -> Text:
        last = self._recent_steps[-1] if self._recent_steps else None
        value = "-" if last is None or not last.num_targets else format_loss(last.loss)
        row = _label("loss").append(value, style="bold")
        length = min(width - _LABEL_WIDTH - len(value) - 2, _MAX_BAR_LENGTH)
        if len(self._losses) > 1 and length > 4:  # a shorter curve shows too little
            row.append("  ").append(_sparkline(list(self._losses), length, glyphs.levels), style=_BUSY)
        return row

    def _validation_row(self, width: int) -> Text | None:
        if self._evaluation_progress is not None:
            return _row(width, "val loss", [f"evaluating, {self._evaluation_progress:.0%}"])
        if self._validation is None:
            return None
        step, evaluation = self._validation.step, self._validation.evaluation
        scores = (f"{name.replace('_', ' ')} {value:,.4f}" for name, value in evaluation.scores.items())
        return _row(width, "val loss", [f"{format_loss(evaluation.loss)} at step {step:,}", *scores])

    def _speed_row(self, width: int) -> Text | None:
        recent = list(self._recent_steps)
        if not recent:
            return None
        seconds = sum(report.seconds for report in recent)
        padding = sum(report.padding for report in recent) / len(recent)
        speed = sum(report.num_targets for report in recent) / seconds
        parts = [f"{speed:,.0f} {self._target_name}/s", f"{format_seconds(seconds / len(recent))} per step"]
        if padding >= 0.005:  # less would be shown as 0%
            parts.append(f"padding {padding:.0%}")
        return _row(width, "speed", parts)

    def _learning_rate_row(self, width: int) -> Text | None:
        if not self._recent_steps:
            return None
        last = self._recent_steps[-1]
        return _row(width, "lr", [f"{last.learning_rate:.2e}", f"gradient norm {last.gradient_norm:.3g}"])

    def _rank_rows(self, width: int, glyphs: _Glyphs) -> list[Text]:
        ranks = self._ranks
        if ranks is None:
            return []
        if len(ranks.busy) == 1:
            return [_row(width, "memory", [format_bytes(ranks.memory[0])])]
        busy = [seconds / ranks.seconds for seconds in ranks.busy]
        if len(busy) <= _MAX_RANKS:
            lines = [(str(rank), fraction, ranks.memory[rank]) for rank, fraction in enumerate(busy)]
        else:
            lines = [
                ("min", min(busy), min(ranks.memory)),
                ("mean", sum(busy) / len(busy), sum(ranks.memory) // len(busy)),
                ("max", max(busy), max(ranks.memory)),
            ]
        name_width = max(len(name) for name, _, _ in lines)
        rows = []
        for index, (name, fraction, memory) in enumerate(lines):
            head, tail = f"{name:<{name_width}} ", f"  {fraction:4.0%} busy   {format_bytes(memory)}"
            length = min(width - _LABEL_WIDTH - len(head) - len(tail), _MAX_BAR_LENGTH)
            row = _label("" if index else "ranks").append(head)
            if length >= _MIN_BAR_LENGTH:
                row.append_text(_bar(fraction, length, (glyphs.busy, _BUSY), (glyphs.waiting, _WAITING)))
            rows.append(row.append(tail))
        return [*rows, _row(width, "", [f"bubble {ranks.bubble:.0%}"])]

    def _short_rank_row(self, width: int, ranks: RankReport) -> Text:
        busy = [seconds / ranks.seconds for seconds in ranks.busy]
        busy_range = f"busy {min(busy):.0%} to {max(busy):.0%}"
        return _row(width, "ranks", [f"bubble {ranks.bubble:.0%}", busy_range, format_bytes(max(ranks.memory))])

    def _saved_row(self, width: int) -> Text | None:
        if self._saved is None:
            return None
        saved_at, report = self._saved
        age = (time.monotonic() if self._ended is None else self._ended) - saved_at
        return _row(width, "saved", [f"step {report.step:,}, {format_bytes(report.num_bytes)}, {_format_age(age)} ago"])

    def _plan_row(self, width: int) -> Text | None:
        if self._plan_report is None or not self._recent_steps:
            return None
        now = format_seconds(sum(report.seconds for report in self._recent_steps) / len(self._recent_steps))
        source = "predicted" if self._plan_report.tried is None else "tried"
        return _row(width, "plan", [f"{source} {format_seconds(self._plan_report.planned)} per step, now {now}"])

    def _failures_row(self, width: int) -> Text | None:
        skipped = self._recent_steps[-1].skipped if self._recent_steps else 0
        counts = (
            (self._restarts, "restart", ""),
            (skipped, "step", " skipped"),
            (self._num_spikes, "spike", " undone"),
            (self._num_failed_saves, "save", " failed"),
        )
        parts = [f"{pluralize(number, noun)}{verb}" for number, noun, verb in counts if number]
        return _row(width, "failures", parts, style="yellow") if parts else None


def _label(name: str) -> Text:
    return Text(no_wrap=True).append(f"{name:<{_LABEL_WIDTH}}", style="dim")


def _row(width: int, name: str, parts: Sequence[str], style: str = "") -> Text:
    """Return a row with as many parts as fit, but at least the first."""
    text = parts[0]
    for part in parts[1:]:
        if _LABEL_WIDTH + len(text) + 3 + len(part) > width:
            break
        text += f"   {part}"
    return _label(name).append(text, style=style)


def _bar(fraction: float, length: int, full: tuple[str, str], empty: tuple[str, str]) -> Text:
    """Return a bar. `full` and `empty` are the character and style of its filled part and of the rest."""
    filled = max(0, min(length, round(fraction * length)))
    return Text().append(full[0] * filled, style=full[1]).append(empty[0] * (length - filled), style=empty[1])


def _sparkline(values: Sequence[float], length: int, levels: str) -> str:
    """Return the values as a curve; each character is the mean of a few of them."""
    length = min(length, len(values))
    edges = [len(values) * index // length for index in range(length + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((mean - low) * scale)] for mean in means)


def _format_clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _format_age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:  # so 1.5 h is 90 min
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
