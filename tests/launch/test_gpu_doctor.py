"""`stretto doctor --gpu`, on CPU ranks that follow NCCL's rules: what passes, and what a hang or a difference gives."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.output import without_gloo_lines
from stretto.cli.main import main
from stretto.launch import CheckResult
from stretto.launch.gpu_checks.catalog import CHECKS, find_check
from stretto.launch.gpu_checks.run_checks import run_gpu_check

Inject = Callable[[str], None]
POST_RECEIVES_BEFORE_CONNECTING = """
from stretto.mesh.channel import Channel
from stretto.mesh.mesh import Mesh

create = Channel.__init__

def ahead(self, *arguments):
    create(self, *arguments)
    self._num_receives_ahead = 2

Channel.__init__ = ahead
Mesh._connect = lambda *arguments, **options: None
"""
OTHER_DATA_ON_RANK_1 = """
import os

if os.environ.get("RANK") == "1":
    from dataclasses import replace
    from stretto.launch.gpu_checks.sample import SampleWindows

    read = SampleWindows.read

    def read_next(self, position, **options):
        return read(self, replace(position, index=position.index + 1), **options)

    SampleWindows.read = read_next
"""
FAILING_RANK_1 = """
import os

if os.environ.get("RANK") == "1":
    from stretto.mesh.mesh import Mesh

    def fail(*arguments):
        raise RuntimeError("NCCL error: unhandled cuda error")

    Mesh.__init__ = fail
"""


@pytest.fixture
def inject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inject:
    """Return a function that makes the ranks of a check run some code first."""

    def write(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return write


def run(name: str, num_ranks: int = 2, seconds: float = 60) -> CheckResult:
    return run_gpu_check(find_check(name), num_ranks, "strict", seconds=seconds)


@pytest.mark.long
@pytest.mark.short
def test_ranks_connect_in_both_directions() -> None:
    result = run("connect")
    assert result.result == "passed", result
    assert [link["ranks"] for link in result.figures["links"]] == ["0-1"] and result.figures["sum_of_ranks"] == 1
    assert "highest latency" in result.message and "lowest bandwidth" in result.message


@pytest.mark.long
@pytest.mark.short
def test_a_layout_equals_one_device_plain_and_recorded() -> None:
    result = run("two stages, chunks")
    assert result.result == "passed", result
    differences = result.figures["differences"]
    assert set(differences) == {"plain", "recorded"}
    assert all(difference <= 1e-4 for values in differences.values() for difference in values.values())
    assert result.figures["recorded_actions"] == 8  # forward and backward of 4 chunks


@pytest.mark.long
def test_a_layout_that_hangs_is_a_failure_that_says_where_each_rank_is(inject: Inject) -> None:
    inject(POST_RECEIVES_BEFORE_CONNECTING)
    started = time.monotonic()
    result = run("two stages, chunks", seconds=25)
    assert result.result == "failed" and result.message.startswith("hung after 25 s; rank 0: "), result
    assert "; rank 1: waiting for the activations of F0.0 (" in result.message
    assert len(result.ranks) == 2 and all(rank["stack"] and rank["exit_code"] is None for rank in result.ranks)
    assert time.monotonic() - started < 120


@pytest.mark.long
def test_a_layout_that_differs_is_a_failure_with_the_difference(inject: Inject) -> None:
    inject(OTHER_DATA_ON_RANK_1)
    result = run("two replicas")
    assert result.result == "failed" and "differ from those on one device by" in result.message, result
    assert "(tolerance 1e-04)" in result.message


@pytest.mark.long
def test_an_error_of_one_rank_is_a_failure_that_names_it(inject: Inject) -> None:
    inject(FAILING_RANK_1)
    result = run("connect")
    assert result.result == "failed", result
    assert result.message == "rank 1 failed: RuntimeError: NCCL error: unhandled cuda error"
    inject(FAILING_RANK_1.replace('"1"', '"0"'))
    result = run("bf16", 1)  # the only rank fails
    assert result.result == "failed" and result.message.startswith("rank 0 failed: RuntimeError: NCCL error"), result


@pytest.mark.long
@pytest.mark.short
def test_a_checkpoint_reads_back_and_resumes_with_the_same_bits() -> None:
    result = run("checkpoint", 1)
    assert result.result == "passed" and result.figures["resume_difference"] == 0, result


def test_a_check_that_needs_more_ranks_is_skipped() -> None:
    result = run("hybrid 2 x 2", 2)
    assert (result.result, result.message) == ("skipped", "needs 4 ranks; this check can use 2")


def test_without_a_gpu_the_error_names_the_backend_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["doctor", "--gpu"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "stretto: error: torch finds no GPU, so there is nothing to check; `stretto doctor` says why, and "
        "`stretto doctor --gpu --backend strict` runs the checks on CPUs\n"
    )
    assert said.out == "", "it fails before the first check"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "strict"], "--backend=strict is an option of --gpu; add --gpu, or leave it out"),
        (["--gpu", "--json", "a"], "--json=a can't be combined with --gpu; leave it out, or use --output"),
        (["--gpu", "--output", "absent/a.json"], "--output=absent/a.json can't be written; choose a file in a folder"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *options]) == 2
    assert capsys.readouterr().err.startswith(f"stretto: error: {message}")


@pytest.mark.long
def test_all_checks_pass_on_the_strict_backend(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stretto", "doctor", "--gpu", "--backend", "strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout
    assert without_gloo_lines(done.stderr) == ""
    report = json.loads((tmp_path / "stretto-doctor.json").read_text())
    assert [check["name"] for check in report["checks"]] == [check.name for check in CHECKS]
    assert report["backend"] == "strict" and report["versions"]["torch"]
    bf16 = next(check["figures"] for check in report["checks"] if check["name"] == "bf16")
    assert bf16["difference"] <= bf16["tolerance"] < 0.04 and bf16["bf16_losses"] != bf16["fp32_losses"]
    results = {check["name"]: check["result"] for check in report["checks"]}
    assert {name for name, result in results.items() if result != "passed"} <= {"fp16"}
    assert done.stdout.splitlines()[-2:] == [
        "no GPU was tested: the ranks ran on CPUs, under NCCL's rules",
        "stretto-doctor.json has all figures",
    ]
    assert set(report["machine"]) == {"date", "os", "cpu", "command"} and all(report["machine"].values())


@pytest.mark.gpu
def test_all_checks_pass_on_gpus(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stretto", "doctor", "--gpu"]
    done = subprocess.run(command, cwd=tmp_path, text=True, check=False)
    assert done.returncode == 0
    assert json.loads((tmp_path / "stretto-doctor.json").read_text())["backend"] == "nccl"
