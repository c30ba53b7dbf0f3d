"""Real Slurm: a task of srun is a rank, and a preempted job resumes when it is queued again."""

import json
import re
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
    assert REQUESTED in script and f"srun --kill-on-bad-exit {RUN}" in script
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


def await_steps(folder: Path, count: int, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (folder / "log.jsonl").exists() and len(losses(folder)) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"the run did not reach step {count}; see {folder.parent}")


def await_job(cluster: Slurm, job: str, output: Path, seconds: float = 240) -> None:
    """Wait until a job has completed; a requeued job would wait for a while, so it is started at once."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = cluster.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()
        if state == "COMPLETED":
            return
        assert state not in ("FAILED", "CANCELLED"), output.read_text()
        if state == "PENDING":
            cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(0.5)
    raise AssertionError(f"the job is {state}:\n{output.read_text()}")
