"""Real Slurm: a task of srun is a rank, and a preempted job resumes when it is queued again."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from helpers.slurm_cluster import Slurm, slurm
from stretto.checkpoint.checkpoint import find_checkpoint
from stretto.data import Corpus
from stretto.mesh.launch_info import first_host

pytestmark = pytest.mark.slurm

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-on-a-cluster.md"
# What the page requests from its cluster; replaced by what this machine has.
REQUESTED = "--nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8"
RUN = "stretto train run.toml --layout.replicas 16"


def script_of_the_page(command: list[str]) -> str:
    """The batch script that docs/how-to/run-on-a-cluster.md shows, with a different command."""
    (script,) = re.findall(r"^```text\n(#!/bin/bash\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert REQUESTED in script and f"srun --kill-on-bad-exit=0 --wait=120 {RUN}" in script
    return str(script).replace(REQUESTED, "--nodes=2 --ntasks=2").replace(RUN, " ".join(command))


def train(data: str, folder: Path, steps: int, *options: str) -> list[str]:
    config = folder.parent / "run.toml"
    config.write_text(
        f'[data]\ntrain = "{data}"\nlanes = 6\nwindow = 24\n[model]\nhidden = 24\nlayers = 2\n[run]\ntimeout = 60\n'
    )
    command = [sys.executable, "-m", "stretto", "train", str(config), "--run.folder", str(folder)]
    return [*command, "--train.steps", str(steps), *options]


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "step"]


@pytest.mark.short
def test_tasks_of_srun_are_ranks_with_the_losses_of_one_rank(byte_corpus: Corpus, tmp_path: Path) -> None:
    with slurm(tmp_path / "slurm") as cluster:
        step = ["srun", "--nodes=2", "--ntasks=3"]
        layout = ["--layout.replicas", "3"]
        output = cluster.run(*step, *train(byte_corpus.location, tmp_path / "three", 6, *layout), seconds=100)
        assert output.count("done: config, log") == 1, output
        # Not within a step, though in a job of several tasks: a single rank.
        alone = ["salloc", "--nodes=2", "--ntasks=2", *train(byte_corpus.location, tmp_path / "one", 6)]
        cluster.run(*alone, seconds=100)
        names = "n[01-03,7],login"
        assert cluster.run("scontrol", "show", "hostnames", names).split()[0] == first_host(names)
    assert len(losses(tmp_path / "one")) == 6
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
def test_a_preempted_job_is_queued_again_and_resumes(byte_corpus: Corpus, tmp_path: Path) -> None:
    options = ["--layout.replicas", "2", "--save.every", "10"]
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        command = train(byte_corpus.location, tmp_path / "run", 400, *options)
        script.write_text(script_of_the_page(command))
        job = cluster.run("sbatch", "--parsable", f"--output={tmp_path}/output", str(script)).strip()
        await_steps(tmp_path / "run", 20)
        # To the tasks, not to the script that started them.
        cluster.run("scancel", "--signal=USR1", job)
        await_job(cluster, job, tmp_path / "output")
    output = (tmp_path / "output").read_text()
    assert "that step is saved, so start again to resume" in output, output
    assert "resume  after step" in output and "done: config, log" in output, output
    assert len(losses(tmp_path / "run")) == find_checkpoint(tmp_path / "run").manifest.training_state.step == 400


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_job_of_which_a_task_was_killed_is_queued_again_and_resumes(
    number: signal.Signals, byte_corpus: Corpus, tmp_path: Path
) -> None:
    options = ["--layout.replicas", "2", "--save.every", "10"]
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        script.write_text(script_of_the_page(train(byte_corpus.location, tmp_path / "run", 100, *options)))
        job = cluster.run("sbatch", "--parsable", f"--output={tmp_path}/output", str(script)).strip()
        await_steps(tmp_path / "run", 20)
        os.kill(find_task(tmp_path / "run", rank=1), number)
        await_job(cluster, job, tmp_path / "output")
    output = (tmp_path / "output").read_text()
    assert re.search(r"srun: error: n\d: task 1: (Killed|Aborted)", output), output
    assert "resume  after step" in output and "done: config, log" in output, output
    assert find_checkpoint(tmp_path / "run").manifest.training_state.step == 100


def test_a_job_is_not_queued_again_after_a_mistake_in_the_config(byte_corpus: Corpus, tmp_path: Path) -> None:
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        command = train(byte_corpus.location, tmp_path / "run", 4, "--layout.replicas", "2", "--data.lanes", "1")
        # The second task reads the config later, as when its node is slower to import torch.
        script.write_text(script_of_the_page(["bash", "-c", f"'sleep $SLURM_PROCID; {' '.join(command)}'"]))
        job = cluster.run("sbatch", "--parsable", f"--output={tmp_path}/output", str(script)).strip()
        assert await_end(cluster, job) == "FAILED"
        assert "ExitCode=2:0" in cluster.run("scontrol", "show", "job", job)
    assert (tmp_path / "output").read_text().count("stretto: error:") >= 1


def test_a_job_that_fails_again_and_again_is_not_queued_forever(tmp_path: Path) -> None:
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        begun = tmp_path / "begun"
        text = script_of_the_page(["bash", "-c", f"'echo $SLURM_PROCID >> {begun}; kill -9 $$'"])
        assert text.count("-lt 20 ]") == 1
        script.write_text(text.replace("-lt 20 ]", "-lt 2 ]"))
        job = cluster.run("sbatch", "--parsable", f"--output={tmp_path}/output", str(script)).strip()
        assert await_end(cluster, job) == "FAILED"
    assert begun.read_text().split().count("0") == 3  # the first start, and two more


def find_task(folder: Path, rank: int) -> int:
    """Return the process of a rank of the run in a folder."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (path / "cmdline").read_bytes().split(b"\0")
            variables = (path / "environ").read_bytes().split(b"\0")
            if str(folder).encode() in arguments and f"SLURM_PROCID={rank}".encode() in variables:
                return int(path.name)
    raise AssertionError(f"rank {rank} is not running")


def await_steps(folder: Path, count: int, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (folder / "log.jsonl").exists() and len(losses(folder)) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"the run did not reach step {count}; see {folder.parent}")


def await_job(cluster: Slurm, job: str, output: Path, seconds: float = 240) -> None:
    """Wait until a job has completed."""
    state = await_end(cluster, job, seconds)
    assert state == "COMPLETED", f"the job is {state}:\n{output.read_text()}"


def await_end(cluster: Slurm, job: str, seconds: float = 120) -> str:
    """Wait until a job has ended; return its state. A requeued job would wait for a while, so it is started at once."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = cluster.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()
        if state in ("COMPLETED", "FAILED", "CANCELLED"):
            return state
        if state == "PENDING":
            # Not within the same second: a node refuses the credential of a job that was revoked in that second.
            time.sleep(2)
            with contextlib.suppress(AssertionError):  # it has started meanwhile
                cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(0.5)
    return state
