"""The live view fits its terminal, says what it knows, and leaves a clean screen."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stretto import Evaluation, StepReport
from stretto.checkpoint import SaveReport
from stretto.cli.main import main
from stretto.cli.views.live_view import LiveView
from stretto.cli.views.training_view import _format_figures
from stretto.data import Corpus
from stretto.train import EvaluationReport, PlanReport, RankReport


def full_view(num_ranks: int = 2, num_steps: int | None = 2000, loss: float = 2.5, skipped: int = 3) -> LiveView:
    """A view that was told of everything there is."""
    view = LiveView(num_steps, "tokens", restarts=1)
    for step in range(1, 31):
        report = StepReport(step, 1, loss + 1 / step, 1024, 0.4, 1e-3, 0.01, 0.2, 0.01, skipped, 0.25)
        view.update(report, step / 2000)
    parts = [0.2 - 0.02 * rank / num_ranks for rank in range(num_ranks)]
    memory = tuple(10**8 * (rank + 1) for rank in range(num_ranks))
    for event in (
        RankReport(30, 0.25, tuple(parts), tuple(0.25 - part for part in parts), memory),
        EvaluationReport(20, Evaluation(250.0, 100, 4.0)),
        SaveReport(30, "runs/one", 12_345_678, 0.1, 0.5),
        PlanReport(23, 0.2, 0.22),
    ):
        view.update(event, 30 / 2000)
    return view


def drawn(view: LiveView, width: int, height: int) -> list[str]:
    return [row.plain for row in view.rows(width, height)]


@given(
    st.integers(1, 200),
    st.integers(1, 60),
    st.integers(1, 40),
    st.none() | st.integers(31, 10**9),
    st.floats(-1e30, 1e30),
)
def test_no_frame_is_larger_than_the_terminal(
    width: int, height: int, num_ranks: int, num_steps: int | None, loss: float
) -> None:
    for view in (full_view(num_ranks, num_steps, loss), LiveView(num_steps, "labels")):
        rows = drawn(view, width, height)
        assert 0 < len(rows) <= height and max(map(len, rows)) <= width
        assert rows[0].startswith("step"[: width - 1])


@pytest.mark.parametrize(("width", "height", "num_ranks"), [(80, 23, 8), (120, 39, 8), (80, 23, 4096), (80, 12, 8)])
def test_all_figures_are_shown_if_there_is_space(width: int, height: int, num_ranks: int) -> None:
    text = "\n".join(drawn(full_view(num_ranks), width, height))
    for figure in (
        *("30/2,000", "left", "2.5333", "2.5000 at step 20", "perplexity 12.18", "4,655 tokens/s", "220 ms per step"),
        *("padding 25%", "bubble 2", "% busy" if height > 20 else "busy 7", "1.00e-03", "step 30, 12.3 MB, 0 s ago"),
        *("predicted 200 ms per step, now 220 ms", "1 restart   3 steps skipped"),
    ):
        assert figure in text, text
    assert text.count(" busy ") == (1 if height < 20 else 8 if num_ranks == 8 else 3)


def test_a_run_whose_layout_was_tried_is_compared_with_the_trial() -> None:
    view = full_view()
    view.update(PlanReport(23, 0.2, 0.22, tried=0.21), 0.1)
    assert any("tried 210 ms per step, now 220 ms" in row for row in drawn(view, 80, 24))


def test_the_curve_falls_with_the_loss() -> None:
    (row,) = (row for row in drawn(full_view(), 80, 24) if row.startswith("loss"))
    curve = row.split()[-1]
    assert curve[0] == "█" and curve[-1] == "▁" and list(curve) == sorted(curve, reverse=True)


def test_a_terminal_without_unicode_gets_ascii_characters() -> None:
    written = io.BytesIO()
    file = io.TextIOWrapper(written, encoding="ascii")
    Console(width=80, height=24, file=file).print(full_view())
    file.flush()
    assert b"####" in written.getvalue()


def test_plain_lines_show_padding_and_bubble_if_there_are_any() -> None:
    def line(padding: float, busy: tuple[float, ...], norm: float = 0.4) -> str:
        report = StepReport(30, 1, 2.5, 1024, norm, 1e-3, 0.01, 0.2, 0.01, 0, padding)
        waiting = tuple(0.22 - part for part in busy)
        return _format_figures([report], RankReport(30, 0.22, busy, waiting, (0,) * len(busy)), "tokens")

    assert line(0.0, (0.22,)) == "loss 2.5000  4,655 tokens/s  norm 0.4  lr 1.00e-03"
    assert line(0.25, (0.22, 0.11)) == f"{line(0.0, (0.22,))}  padding 25%  bubble 25%"
    assert "norm 0.00123 " in line(0.0, (0.22,), 0.0012345), "a small gradient is not zero"


class Screen:
    """As much of a terminal as it takes to see what is on it at the end."""

    def __init__(self, width: int) -> None:
        self.width, self.rows, self.row, self.column = width, [""], 0, 0

    def feed(self, text: str) -> list[str]:
        for control, plain in re.findall(r"(\x1b\[[?0-9;]*[a-zA-Z]|\r|\n)|([^\x1b\r\n]+)", text):
            if plain:
                self._write(plain)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self.row += 1
                self.rows += [""] * (self.row == len(self.rows))
            elif control.endswith("A"):
                self.row -= int(control[2:-1] or 1)
            elif control.endswith("K"):
                self.rows[self.row] = ""
            else:
                assert control[-1] in "mhl", f"{control!r} is not understood"
        return self.rows

    def _write(self, text: str) -> None:
        assert self.column + len(text) <= self.width or "─" not in text, "the view is never wrapped"
        line = self.rows[self.row]
        self.rows[self.row] = line[: self.column].ljust(self.column) + text + line[self.column + len(text) :]
        self.column += len(text)


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "height", "layout"),
    [(80, 24, []), (120, 40, ["--layout.stages", "2", "--layout.chunks", "4"])],
    ids=["one rank", "two ranks"],
)
def test_a_run_in_a_terminal_leaves_its_last_frame_and_nothing_else(
    width: int, height: int, layout: list[str], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "text", str(text_file), "--out", "data", "--validation-fraction", "0.2"]) == 0
    (tmp_path / "run.toml").write_text(
        '[data]\ntrain = "data/train"\nvalid = "data/valid"\nlanes = 8\nwindow = 20\n[model]\nhidden = 16\n'
        '[train]\nsteps = 20\n[run]\nfolder = "runs/one"\neval_every = 10\n[save]\nevery = 10\n'
    )
    # Without colours, a terminal is told where to draw and nothing else.
    seen = run_in_terminal(["train", "run.toml", *layout], width, height, {"NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][0-9;]*m", seen) and seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")
    rows = Screen(width).feed(seen)
    text = "\n".join(rows)
    for label in ("step      ", "loss      ", "val loss  ", "speed     ", "lr        ", "saved     "):
        assert sum(row.startswith(label) for row in rows) == 1, f"one frame is left\n{text}"
    frame = rows[next(index for index, row in enumerate(rows) if row.startswith("step      ")) :]
    assert frame[0].startswith("step      20/20  ━") and "100%  in 0:0" in frame[0]
    assert "at step 20" in frame[2] and "tokens/s" in frame[3]
    assert text.count(" busy ") == (2 if layout else 0) and ("bubble" in text) == bool(layout)
    assert frame[-2].startswith("done: config") and frame[-1] == ""
    said = rows[: len(rows) - len(frame)]
    # A save in the background may be told of later than it was made.
    assert sorted(row.split(":")[0] for row in said if row.startswith(("saved", "step"))) == [
        *("saved step 10", "saved step 20", "step 10/20  validation", "step 20/20  validation")
    ], "messages scroll above it"


def run_in_terminal(arguments: list[str], width: int, height: int, environment: dict[str, str]) -> str:
    """Run the command in a terminal of this size; return all that it wrote."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", *arguments],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**inherited, "TERM": "xterm-256color", **environment},
    )
    os.close(child)
    seen = b""
    while True:
        try:
            seen += os.read(parent, 4096)
        except OSError:
            break
    os.close(parent)
    assert process.wait() == 0, seen.decode()
    return seen.decode()


def test_a_run_names_the_settings_that_have_no_effect_on_one_rank(
    byte_corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 2\nwindow = 4\n[model]\nhidden = 4\n[train]\nsteps = 1\n'
        f'[layout]\ninterleave = 2\n[run]\nfolder = "{tmp_path / "run"}"\n'
        "[sentinel]\nhash_every = 1\n"
    )
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    hints = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hint ") and "no effect" in line]
    assert [hint.split()[1] for hint in hints] == ["sentinel.hash_every=1", "layout.interleave=2"]
