"""The examples of `stretto.parallelize` under each framework: the new line changes no loss, on one rank or on two."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.launch.rank_environment import free_port

EXAMPLES = Path(__file__).parents[1] / "examples" / "parallelize"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
PAGE = EXAMPLES.parents[1] / "docs" / "how-to" / "parallelize.md"
HELPERS = Path(__file__).parent / "helpers"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SECONDS = 250
# What Lightning and FSDP2 say of their own code and of this machine, with and without the line.
OWN_WARNINGS = [
    "`isinstance(treespec:FutureWarning",
    "The 'train_dataloader' does not have many workers:UserWarning",
    "The 'val_dataloader' does not have many workers:UserWarning",
    "The `srun` command is available on your system:UserWarning",
    "FSDP2-wrapped module (FSDP:UserWarning",
]


def run(folder: Path, *command: str) -> tuple[str, str]:
    """Run a command in a folder; return its output and errors. Processes that send messages of a region say so."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder), "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": ",".join(["error", *(f"ignore:{warning}" for warning in OWN_WARNINGS)]),
        "PYTHONPATH": str(HELPERS / "noticed_messages"), "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    errors = "".join(path.read_text() for path in folder.glob("*.err"))
    assert done.returncode == 0, errors + done.stderr[-3000:]
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the outputs of all examples, on one rank and on two, with the line and without."""
    folder = tmp_path_factory.mktemp("examples")
    runs = [
        f"{name}_{size}_{kind}={EXAMPLES / name}.py:{size}:{option}"
        for name in NAMES
        for size in (1, 2)
        for kind, option in (("plain", "--plain"), ("line", ""))
    ]
    run(folder, sys.executable, str(HELPERS / "run_examples.py"), *runs)
    return folder


def losses(printed: str) -> list[str]:
    """The losses as printed, of each epoch and of validation; `train_loss` is Trainer's mean over all epochs."""
    found = re.findall(r"(?<!train_)loss'?:? '?(\d\.\d+)", printed)
    assert len(found) >= 4, printed
    return found


def assert_equal(found: list[str], expected: list[str]) -> None:
    """Assert that losses are equal to the digits that are printed; the last one may be rounded differently."""
    for loss, other in zip(found, expected, strict=True):
        assert float(loss) == pytest.approx(float(other), abs=1.01 * 10.0 ** -(len(other) - 2)), (found, expected)


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize("name", NAMES)
def test_the_line_changes_no_loss(name: str, forked: Path) -> None:
    expected = losses((forked / f"{name}_1_plain.0.out").read_text())
    assert float(expected[-1]) < 0.3 * float(expected[0]), "it learns"
    for size, kind in ((1, "line"), (2, "plain"), (2, "line")):
        assert_equal(losses((forked / f"{name}_{size}_{kind}.0.out").read_text()), expected)
        for rank in range(size):
            has_sent = "sent messages\n" in (forked / f"{name}_{size}_{kind}.{rank}.err").read_text()
            assert has_sent == (size == 2 and kind == "line"), (size, kind, rank)


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize(
    ("name", "start"), [("ddp", [sys.executable]), ("lightning_ddp", [sys.executable]), ("accelerate_ddp", TORCHRUN)]
)
def test_an_example_started_by_its_own_command_has_the_losses_of_one_rank(
    name: str, start: list[str], forked: Path, tmp_path: Path
) -> None:
    printed, said = run(tmp_path, *start, str(EXAMPLES / f"{name}.py"))
    assert_equal(losses(printed), losses((forked / f"{name}_1_plain.0.out").read_text()))
    assert said.count("sent messages\n") == 2


def test_the_page_shows_lines_of_each_example() -> None:
    pattern = r"^<!-- examples/parallelize/(\w+)\.py -->\n```py\n(.*?)^```"
    pieces = re.findall(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert {name for name, _ in pieces} == {*NAMES}
    for name, code in pieces:
        assert code in (EXAMPLES / f"{name}.py").read_text(), name
