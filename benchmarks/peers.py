"""The same training step by stretto and its peers, on one and two ranks of this machine.

    python benchmarks/peers.py [--quick] [--page FILE] [--only torch stretto]

Makes a venv for each peer (in `--venvs`, kept for the next run), starts all of them for a case, and lets them take
turns: one thread per rank, all other processes paused. All train the same weights on the same batch, so their losses
must agree. A full run writes docs/benchmarks.md, with table, picture, versions and date; one with `--quick`, `--only`
or `--cases` writes a page only if asked to. The last line is one JSON object.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import IO

import torch
from rich.console import Console
from rich.progress import track

from peer_scripts.case import NOTE, Case
from peer_scripts.page import write_page
from stretto.launch.rank_environment import free_port
from stretto.measure.timing import median_ratio
from timing import show

SCRIPTS = Path(__file__).parent / "peer_scripts"
ROOT = Path(__file__).parents[1]
# The losses of the first steps must agree up to TOLERANCE, relative, and must change by much more than that.
NUM_CHECKED_STEPS, TOLERANCE, SMALLEST_CHANGE = 4, 1e-4, 1e-3
TIME_LIMIT = 300.0  # seconds for a start, and for a step
# After the first rounds, contenders that take more than FAST_FACTOR times as long as the fastest are dropped, except
# the first, torch on one rank: the others are compared with it within rounds.
WARM_UP_ROUNDS, FIRST_ROUNDS, ROUNDS, QUICK_ROUNDS = 2, 2, 10, 2
FAST_FACTOR = 3.0

CASES = {
    "deep": Case(rows=32, steps=128, layers=4, hidden=512),
    "few rows": Case(rows=4, steps=512, layers=4, hidden=512),
    "bidirectional": Case(rows=16, steps=128, layers=4, hidden=256, is_bidirectional=True),
    "unequal lengths": Case(rows=32, steps=256, layers=4, hidden=256, shortest=16),
    "word model": Case(rows=16, steps=64, layers=2, hidden=512, vocabulary=10_000),
}


@dataclass(frozen=True)
class Peer:
    """A framework, and how it is installed and started."""

    script: str
    packages: tuple[str, ...] = ()  # besides torch, in a venv of its own; empty for this interpreter's
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] = (1, 2)
    cases: frozenset[str] = frozenset(CASES)
    has_same_model: bool = True
    sends_heartbeats: bool = False  # several ranks can't be paused between their turns


# As `stretto.base.freed_memory` sets them.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": "-1"}
PEERS = {
    "torch": Peer("torch_ddp.py"),
    "torch, 2 threads": Peer("torch_ddp.py", environment={"OMP_NUM_THREADS": "2"}, ranks=(1,)),
    "torch, tuned": Peer("torch_tuned.py", environment=KEEP_FREED_MEMORY),
    "torch, packed rows": Peer("torch_packed.py", cases=frozenset({"unequal lengths"})),
    "torch pipelining": Peer("torch_pipelining.py", ranks=(2,)),
    "Lightning": Peer("lightning_ddp.py", ("lightning==2.6.6",)),
    "Accelerate": Peer("accelerate_ddp.py", ("accelerate==1.15.0",)),
    "TensorFlow": Peer("tensorflow_mwms.py", ("tensorflow-cpu==2.21.0",), sends_heartbeats=True),
    "Keras on torch": Peer(
        "keras_torch.py", ("keras==3.15.1",), ranks=(1,), cases=frozenset({"deep", "few rows", "word model"})
    ),
    "xlstm (mLSTM)": Peer("xlstm_ddp.py", ("xlstm==2.0.6",), cases=frozenset({"deep"}), has_same_model=False),
    "stretto": Peer("stretto_layout.py"),
}


@dataclass
class Contender:
    """The running processes of a peer on a number of ranks, and what was measured."""

    name: str
    peer: Peer
    num_ranks: int
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    note: str = ""  # what it has chosen for this case
    error: str = ""

    def start(self, case: Case, python: Path, log: IO[str]) -> None:
        port = free_port()
        for rank in range(self.num_ranks):
            variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            if self.num_ranks > 1:
                variables |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    "WORLD_SIZE": str(self.num_ranks), "LOCAL_WORLD_SIZE": str(self.num_ranks), "GROUP_RANK": "0",
                    "TORCHELASTIC_RUN_ID": "peers", "STRETTO_SECRET": "only for this benchmark",
                }  # fmt: skip
            command = [str(python), str(SCRIPTS / self.peer.script), json.dumps(asdict(case))]
            environment = {**os.environ, **variables, **self.peer.environment}
            self.processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                    bufsize=1,
                )
            )  # fmt: skip
        with self._time_limit():
            self._await_start()
        self._signal(signal.SIGSTOP)  # until its turn

    def _await_start(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            while (line := process.stdout.readline()).strip() != "ready":
                if not line:
                    self.fail("did not start")
                    return
                if line.startswith(NOTE):
                    self.note = line.removeprefix(NOTE).strip()

    def step(self, is_counted: bool) -> None:
        """Let all ranks take one step."""
        if self.error:
            return
        self._signal(signal.SIGCONT)
        try:
            with self._time_limit():
                for process in self.processes:
                    assert process.stdin is not None
                    process.stdin.write("step\n")
                    process.stdin.flush()
                answers = [self._answer(process) for process in self.processes]
        except (OSError, ValueError) as error:
            self.fail(f"failed in a step: {error}")
            return
        self.losses.append(sum(loss for _, loss in answers))
        if is_counted:
            self.seconds.append(max(seconds for seconds, _ in answers))
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """Pause or resume all ranks: threads of gloo wake up 100 times a second, also in a rank that waits."""
        if self.num_ranks == 1 or not self.peer.sends_heartbeats:
            for process in self.processes:
                process.send_signal(number)

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        """Kill all ranks after some minutes: one that waits for a lost one would wait for half an hour."""
        timer = threading.Timer(TIME_LIMIT, self.stop)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _answer(self, process: "subprocess.Popen[str]") -> tuple[float, float]:
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line.startswith("["):
                seconds, loss = json.loads(line)
                return seconds, loss
        raise ValueError("a rank ended")

    def fail(self, what: str) -> None:
        self.error = what
        self.stop()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    @property
    def label(self) -> str:
        return f"{self.name}, {'one rank' if self.num_ranks == 1 else f'{self.num_ranks} ranks'}"


def make_venv(folder: Path, peer: Peer) -> Path:
    """Return the Python of a peer's venv, which is made if it does not exist."""
    if not peer.packages:
        return Path(sys.executable)
    python = folder / peer.packages[0].split("=")[0] / "bin" / "python"
    if not (python.parent / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        needs_torch = "tensorflow" not in peer.packages[0]
        subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
        install = [f"{python.parent}/uv", "pip", "install", "--quiet", "--python", str(python), *peer.packages]
        links = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
        subprocess.run([*install, *(["torch==2.13.0"] if needs_torch else [])], env={**os.environ, **links}, check=True)
        (python.parent / "complete").touch()
    return python


def check_losses(contenders: list[Contender]) -> None:
    """Name the contenders whose losses differ from those of torch on one rank; if it failed, of the next one."""
    reference: list[float] = []
    for contender in contenders:
        if contender.error or not contender.peer.has_same_model:
            continue
        losses = contender.losses[:NUM_CHECKED_STEPS]
        if reference:
            pairs = zip(losses, reference, strict=True)
            if not all(
                abs(loss / expected - 1) <= TOLERANCE for loss, expected in pairs
            ):  # also if one is not a number
                contender.error = f"losses {losses} differ from {reference}"
        elif SMALLEST_CHANGE < abs(losses[-1] / losses[0] - 1) < math.inf:
            reference = losses
        else:
            contender.error = f"losses {losses} would hide a wrong gradient"


def take_turns(contenders: list[Contender], rounds: int, title: str) -> None:
    """Let the contenders take steps in turns; each round goes in the opposite direction of the one before."""
    for index in track(range(WARM_UP_ROUNDS + rounds), title, console=Console(stderr=True), transient=True):
        if index == WARM_UP_ROUNDS + FIRST_ROUNDS:
            medians = [statistics.median(each.seconds) for each in contenders if each.seconds]
            limit = FAST_FACTOR * min(medians, default=math.inf)
            fast = [each for each in contenders[1:] if min(each.seconds, default=math.inf) <= limit]
            contenders = [contenders[0], *fast]
        for contender in contenders if index % 2 else reversed(contenders):
            contender.step(is_counted=index >= WARM_UP_ROUNDS)


def typical_seconds(contender: Contender, base: Contender) -> float:
    """Return the time of a step relative to the base in the same round (the median), times that of the base."""
    if base.error:
        return statistics.median(contender.seconds)
    ratio = median_ratio(contender.seconds, base.seconds[: len(contender.seconds)])
    return ratio * statistics.median(base.seconds)


def run_case(name: str, case: Case, peers: dict[str, Peer], venvs: Path, rounds: int) -> list[Contender]:
    """Start all peers, let them take turns, and return what was measured."""
    contenders = [
        Contender(peer_name, peer, num_ranks)
        for peer_name, peer in peers.items()
        if name in peer.cases
        for num_ranks in peer.ranks
    ]
    console = Console(stderr=True)
    with tempfile.TemporaryFile("w+") as log:
        try:
            for contender in track(contenders, f"{name}: starting", console=console, transient=True):
                contender.start(case, make_venv(venvs, contender.peer), log)
            take_turns(contenders, rounds, f"{name}: measuring")
        finally:
            for contender in contenders:
                contender.stop()
            log.seek(0)
            output = log.read()
    check_losses(contenders)
    if any(contender.error for contender in contenders):
        console.print(output[-4000:], markup=False)
    return contenders


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The same training step by stretto and its peers.")
    parser.add_argument("--quick", action="store_true", help="small models and few rounds: shows that all peers run")
    parser.add_argument("--page", type=Path, help="the Markdown file to write, with a picture beside it")
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "stretto-peers", help="folder of venvs")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), help="peers to run; torch always does")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="cases to run")
    options = parser.parse_args()
    is_full = not options.quick and options.only == list(PEERS) and options.cases == list(CASES)
    options.page = options.page or (ROOT / "docs" / "benchmarks.md" if is_full else None)
    return options


def main() -> None:
    options = parse()
    peers = {name: peer for name, peer in PEERS.items() if name in {"torch", *options.only}}
    for peer in track(peers.values(), "Installing", console=Console(stderr=True), transient=True):
        make_venv(options.venvs, peer)
    results: dict[str, dict[str, float | str]] = {}
    notes: dict[str, str] = {}
    cases: dict[str, Case] = {}
    for name in options.cases:
        case = CASES[name]
        if options.quick:
            case = replace(case, steps=max(16, case.steps // 8), hidden=64, vocabulary=case.vocabulary // 10,
                           shortest=case.shortest // 8)  # fmt: skip
        cases[name] = case
        contenders = run_case(name, case, peers, options.venvs, QUICK_ROUNDS if options.quick else ROUNDS)
        results[name] = {
            contender.label: contender.error or typical_seconds(contender, contenders[0]) for contender in contenders
        }
        notes[name] = next((contender.note for contender in reversed(contenders) if contender.note), "")
    labels = list(dict.fromkeys(label for rows in results.values() for label in rows))
    ratios = {
        f"{name}: {label}": base / seconds
        for name in results
        for label, seconds in results[name].items()
        if not isinstance(seconds, str) and not isinstance(base := results[name]["torch, one rank"], str)
    }
    if options.page:
        versions = [f"torch=={torch.__version__}", *(name for peer in peers.values() for name in peer.packages)]
        write_page(options.page, cases, results, notes, versions, date.today())
    rows = [[label, *(_cell(results[name].get(label)) for name in results)] for label in labels]
    show("Seconds per step", ["peer", *results], rows, ratios)


def _cell(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.3f}"


if __name__ == "__main__":
    main()
