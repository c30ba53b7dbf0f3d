"""Make the pictures of the docs from a real run: `python tests/docs_images.py docs/images`.

It needs tmux for the live view and Chromium for the screenshots, and takes a few minutes on two cores.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path
from pydoc_data import topics

from rich.console import Console
from rich.text import Text

from stretto.plan.trace import Trace
from stretto.report.gantt import bars_from_trace, gantt

RUN = (
    "--layout.stages 2 --layout.chunks 4 --model.layers 2 --model.hidden 128 --model.residual true --model.dropout 0.05"
)
TIMES = "--train.epochs 3 --run.eval_every 100 --run.log_every 20 --save.minutes 0.4 --run.folder runs/manual"
PLAN = "--hardware H100 --devices 8 --model.layers 8 --model.hidden 1024 --model.dropout 0 --html plan.html"
COLUMNS = 116
# As rich has it, but without fonts from the network.
SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg"><style>{styles}
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, monospace; line-height: {line_height}px; }}
.{unique_id}-title {{ font: bold 18px sans-serif; }}</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""
# Chromium refuses its sandbox to root, and looks for updates unless told not to.
BROWSER = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --hide-scrollbars"
)


def run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)


def prepare_data() -> None:
    """Prepare the text of Python's manual, as the quick start does."""
    Path("manual.txt").write_text("\n".join(topics.topics.values()))
    run("stretto init manual.txt --name manual --yes")


def capture_live_view(out: Path) -> None:
    """Train in a terminal, and capture it after two thirds of the run."""
    tmux = "tmux -L stretto-images"  # a server of its own, with the environment of this process
    run(f"{tmux} new-session -d -x {COLUMNS} -y 24 'stretto train run.toml {RUN} {TIMES}'")
    capture = shlex.split(f"{tmux} capture-pane -e -p")
    screen = ""
    while (shown := subprocess.run(capture, capture_output=True, text=True)).returncode == 0:
        progress = re.search(r"^step .* (\d+)%", re.sub(r"\x1b\[[\d;]*m", "", shown.stdout), re.MULTILINE)
        if not screen and progress and int(progress[1]) > 66:
            screen = shown.stdout.rstrip()
        time.sleep(0.5)
    console = Console(record=True, width=COLUMNS, file=StringIO())
    console.print(Text.from_ansi(screen))
    out.write_text(console.export_svg(title="stretto train run.toml", code_format=SVG))


def take_screenshot(page: Path, out: Path, height: int) -> None:
    browser = shutil.which("chromium-headless-shell") or "chromium"
    profile = f"--user-data-dir={Path('browser').absolute()}"
    run(f"{browser} {BROWSER} {profile} --window-size=1200,{height} --screenshot={out} file://{page.absolute()}")


def main() -> None:
    out = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        prepare_data()
        capture_live_view(out / "live.svg")
        run("stretto report runs/manual --out report.html")
        take_screenshot(Path("report.html"), out / "report.png", 1000)
        run(f"stretto plan run.toml {PLAN}")
        take_screenshot(Path("plan.html"), out / "plan.png", 1240)
        trace = Trace.from_json(Path("runs/manual/trace.json").read_text(), "trace.json")
        chart = gantt(f"Step {trace.step}, measured", *bars_from_trace(trace, 8))
        (out / "timeline.svg").write_text(chart.to_svg())


if __name__ == "__main__":
    main()
