"""Real Slurm: a task of srun is a rank, and a job that ends in any way but one is queued again and resumes."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.fault_loss import FaultMeter, LossRecorder, logged_losses
from helpers.slurm_cluster import Slurm, slurm
from stretto.checkpoint.checkpoint import find_checkpoint
from stretto.cli.main import main
from stretto.data import Corpus
from stretto.mesh.launch_info import first_host

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-on-a-cluster.md"
# What the page requests from its cluster; replaced by what this machine has.
REQUESTED = "--ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8"
RUN = "stretto train run.toml"
STEPS = 600
LAYOUT = ("--layout.replicas", "2", "--save.every", "10")


def script_of_the_page(command: list[str], heading: str = "## Slurm", tasks_per_node: int = 1) -> str:
    """The first batch script after a heading of docs/how-to/run-on-a-cluster.md, with a different command."""
    section = PAGE.read_text().partition(f"\n{heading}\n")[2]
    script = re.findall(r"^```text\n(#!/bin/bash\n.*?)^```", section, re.MULTILINE | re.DOTALL)[0]
    assert REQUESTED in script and script.count(RUN) == 1
    # The options after RUN are those of the page's layout.
    script = re.sub(rf"{RUN}( --layout\.\S+ \S+)*", lambda _: " ".join(command), str(script))
    script = script.replace(REQUESTED, f"--ntasks-per-node={tasks_per_node}")
    return script.replace("nodes * 8", f"nodes * {tasks_per_node}")


def train(data: str, folder: Path | str, steps: int, *options: str) -> list[str]:
    config = Path(data).parent / "run.toml"
    config.write_text(
        f'[data]\ntrain = "{data}"\nlanes = 6\nwindow = 24\n[model]\nhidden = 24\nlayers = 2\n[run]\ntimeout = 60\n'
    )
    command = [sys.executable, "-m", "stretto", "train", str(config), "--run.folder", str(folder)]
    return [*command, "--train.steps", str(steps), *options]


@pytest.fixture(scope="module")
def expected(byte_corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of an uninterrupted run on one rank."""
    folder = tmp_path_factory.mktemp("one") / "run"
    assert main(train(byte_corpus.location, folder, STEPS)[3:]) == 0
    return logged_losses(folder)


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
    assert len(logged_losses(tmp_path / "one")) == 6
    assert logged_losses(tmp_path / "three") == pytest.approx(logged_losses(tmp_path / "one"), rel=1e-5)


def kill_a_rank(number: signal.Signals) -> Callable[[Slurm, str, Path], None]:
    return lambda cluster, job, folder: os.kill(find_task(folder, rank=1), number)


def signal_the_tasks(cluster: Slurm, job: str, folder: Path) -> None:
    cluster.run("scancel", "--signal=USR1", job)  # to the tasks, not to the script that started them


def lose_a_node(cluster: Slurm, job: str, folder: Path) -> None:
    cluster.lose_node("n2")
    await_state(cluster, job, "PENDING")
    cluster.start_node("n2")


def drain_a_node(cluster: Slurm, job: str, folder: Path) -> None:
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    cluster.run("scontrol", "requeue", job)  # as an administrator does who does not want to wait for its end
    await_state(cluster, job, "PENDING")
    cluster.run("scontrol", "update", "nodename=n2", "state=resume")


def requeue(cluster: Slurm, job: str, folder: Path) -> None:
    cluster.run("scontrol", "requeue", job)


def preempt(cluster: Slurm, job: str, folder: Path) -> None:
    cluster.run("srun", "--partition=urgent", "--nodes=2", "--exclusive", "sleep", "1")


DEATHS = {
    "SIGKILL of a rank": kill_a_rank(signal.SIGKILL),
    "SIGABRT of a rank": kill_a_rank(signal.SIGABRT),
    "USR1": signal_the_tasks,
    "node failure": lose_a_node,
    "scontrol requeue": requeue,
    "node drained": drain_a_node,
    "preemption": preempt,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "death", [pytest.param(name, marks=[pytest.mark.faults] if "node" in name else []) for name in DEATHS]
)
def test_a_job_is_queued_again_after_every_kind_of_death_and_resumes(
    death: str, byte_corpus: Corpus, expected: dict[int, float], tmp_path: Path, record_loss: LossRecorder
) -> None:
    output = tmp_path / "output"
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        script.write_text(script_of_the_page(train(byte_corpus.location, tmp_path / "run", STEPS, *LAYOUT)))
        job = cluster.submit(script, output)
        await_steps(tmp_path / "run", 20)
        death_time = time.monotonic()
        DEATHS[death](cluster, job, tmp_path / "run")
        if "node" in death:  # the job waits for the node, so it takes no steps
            meter = FaultMeter(tmp_path / "run", death_time)
            cluster.start_now(job)
            record_loss(meter.await_progress())
        assert cluster.await_end(job) == "COMPLETED", output.read_text()
    text = output.read_text()
    assert "resume  after step" in text and "done: config, log" in text, text
    saves = death in ("USR1", "scontrol requeue", "node drained", "preemption")
    assert ("that step is saved, so start again to resume" in text) == saves, text
    assert logged_losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    assert find_checkpoint(tmp_path / "run").manifest.training_state.step == STEPS


def test_a_job_saves_before_its_time_limit_and_continues_in_the_next(byte_corpus: Corpus, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        command = train(byte_corpus.location, tmp_path / "run", 10**6, "--layout.replicas", "2", "--save.minutes", "0")
        script.write_text(script_of_the_page(command).replace("USR1@120", "USR1@70"))
        # Slurm looks every 30 s, and sends the signal up to 30 s early: here 20 to 50 s after the job has started.
        job = cluster.submit(script, output, "--time=2")
        await_steps(tmp_path / "run", 1)
        await_state(cluster, job, "PENDING", seconds=60)
        saved = find_checkpoint(tmp_path / "run").manifest.training_state.step
        cluster.start_now(job)
        await_steps(tmp_path / "run", saved + 20)
        cluster.run("scancel", job)
    text = output.read_text()
    assert f"stopped after step {saved}, as requested; that step is saved" in text, text
    assert f"resume  after step {saved:,}" in text, text


def test_tasks_of_an_array_are_runs_of_their_own(
    byte_corpus: Corpus, expected: dict[int, float], tmp_path: Path
) -> None:
    output = tmp_path / "output-%a"
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        command = train(byte_corpus.location, f"{tmp_path}/runs/$SLURM_ARRAY_TASK_ID", STEPS, *LAYOUT)
        script.write_text(script_of_the_page(command))
        job = cluster.submit(script, output, "--array=1-2")
        for task in ("1", "2"):
            await_steps(tmp_path / "runs" / task, 20)
        os.kill(find_task(tmp_path / "runs" / "1", rank=1), signal.SIGKILL)
        # Task 2 is not disturbed; task 1 is queued again.
        until = time.monotonic() + 60
        while cluster.await_end(f"{job}_1", 5) != "COMPLETED" and time.monotonic() < until:
            pass
        assert cluster.await_end(job).split() == ["COMPLETED", "COMPLETED"]
    texts = {task: (tmp_path / f"output-{task}").read_text() for task in ("1", "2")}
    assert "resume  after step" in texts["1"] and "resume  after step" not in texts["2"], texts
    for task in texts:
        assert logged_losses(tmp_path / "runs" / task) == pytest.approx(expected, rel=1e-5)


def test_tasks_of_an_array_continue_one_run_one_after_the_other(
    byte_corpus: Corpus, expected: dict[int, float], tmp_path: Path
) -> None:
    output = tmp_path / "output-%a"
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        command = train(byte_corpus.location, tmp_path / "run", STEPS, *LAYOUT)
        text = script_of_the_page(command, "### Array jobs")
        assert "--array=1-10%1" in text and "requeue" not in text
        script.write_text(text.replace("1-10%1", "1-3%1"))
        job = cluster.submit(script, output)
        await_steps(tmp_path / "run", 20)
        os.kill(find_task(tmp_path / "run", rank=1), signal.SIGUSR1)
        assert sorted(cluster.await_end(job).split()) == ["COMPLETED", "COMPLETED", "FAILED"]
    first, second, third = ((tmp_path / f"output-{task}").read_text() for task in (1, 2, 3))
    assert "that step is saved" in first and "resume  after step" in second and "done: config, log" in second
    assert f"already done, at step {STEPS}" in third
    assert logged_losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("how", ["a node fails", "the job is made smaller"])
def test_a_job_whose_allocation_shrinks_continues_on_the_remaining_nodes(
    how: str, byte_corpus: Corpus, expected: dict[int, float], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        options = ("--layout.replicas", "4", "--layout.elastic", "true", "--save.every", "10")
        command = train(byte_corpus.location, tmp_path / "run", STEPS, *options)
        script.write_text(script_of_the_page(command, "### Fewer nodes", tasks_per_node=2))
        job = cluster.submit(script, output)
        await_steps(tmp_path / "run", 20)
        if how == "a node fails":
            cluster.lose_node("n2")
        else:
            cluster.run("scontrol", "update", f"JobId={job}", "NumNodes=1")
        assert cluster.await_end(job) == "COMPLETED", output.read_text()
        assert "Restarts=0" in cluster.run("scontrol", "show", "job", job)
    text = output.read_text()
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["ranks"] for row in rows if row["kind"] == "start"] == [4, 2], text
    assert logged_losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)


def test_a_job_is_not_queued_again_after_a_mistake_in_the_config(byte_corpus: Corpus, tmp_path: Path) -> None:
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        command = train(byte_corpus.location, tmp_path / "run", 4, "--layout.replicas", "2", "--data.lanes", "1")
        # The second task reads the config later, as when its node is slower to import torch.
        script.write_text(script_of_the_page(["bash", "-c", f"'sleep $SLURM_PROCID; {' '.join(command)}'"]))
        job = cluster.submit(script, tmp_path / "output")
        assert cluster.await_end(job) == "FAILED"
        assert "ExitCode=2:0" in cluster.run("scontrol", "show", "job", job)
    assert (tmp_path / "output").read_text().count("stretto: error:") >= 1


def test_a_job_that_fails_again_and_again_is_not_queued_forever(tmp_path: Path) -> None:
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        begun = tmp_path / "begun"
        text = script_of_the_page(["bash", "-c", f"'echo $SLURM_PROCID >> {begun}; kill -9 $$'"])
        assert text.count("-lt 20 ]") == 1
        script.write_text(text.replace("-lt 20 ]", "-lt 2 ]"))
        job = cluster.submit(script, tmp_path / "output")
        assert cluster.await_end(job) == "FAILED"
    assert begun.read_text().split().count("0") == 3  # the first start, and two more


def test_no_process_of_a_job_outlives_its_cluster(tmp_path: Path) -> None:
    with slurm(tmp_path / "slurm") as cluster:
        script = tmp_path / "job.sh"
        script.write_text(
            f"#!/bin/bash\nsrun bash -c 'echo $$ >> {tmp_path}/pids; trap \"\" TERM; sleep 600 & wait; sleep 600'\n"
        )
        cluster.submit(script, tmp_path / "output", "--nodes=2", "--ntasks=2")
        until = time.monotonic() + 30
        while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
            assert time.monotonic() < until
            time.sleep(0.1)
        pids = (tmp_path / "pids").read_text().split()
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    # Of a process that has ended, and that nobody has waited for, this file is empty.
    commands = [Path(f"/proc/{pid}/cmdline") for pid in pids]
    assert not any(path.exists() and path.read_bytes() for path in commands)


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
        if (folder / "log.jsonl").exists() and len(logged_losses(folder)) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"the run did not reach step {count}; see {folder.parent}")


def await_state(cluster: Slurm, job: str, state: str, seconds: float = 40) -> None:
    until = time.monotonic() + seconds
    while cluster.state(job) != state:
        assert time.monotonic() < until, f"the job is {cluster.state(job)}, not {state}"
        time.sleep(0.2)
