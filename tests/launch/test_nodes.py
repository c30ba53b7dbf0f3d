"""Several nodes, each with a `stretto train` that launches its own ranks, as the pods of a JobSet are."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.fault_loss import logged_losses
from helpers.train_process import children
from stretto.checkpoint.checkpoint import find_checkpoint
from stretto.cli.main import main
from stretto.data import Corpus
from stretto.errors import MeshError
from stretto.launch.rank_environment import free_port
from stretto.mesh.node_info import find_node_info

VARIABLES = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "first-node-0-0.first",
    "PET_MASTER_PORT": "29500",
}


def test_the_variables_of_torchrun_describe_a_node() -> None:
    node = find_node_info(VARIABLES)
    assert node is not None
    assert (node.index, node.num_nodes, node.ranks_per_node, node.num_ranks) == (1, 2, 8, 16)
    assert (node.address, node.port) == ("first-node-0-0.first", 29500)


def test_a_rank_and_a_single_node_are_not_nodes_among_several() -> None:
    rank = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0")
    rank |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    assert find_node_info({}) is None
    assert find_node_info({**VARIABLES, **rank}) is None
    assert find_node_info({**VARIABLES, "PET_NNODES": "1"}) is None
    assert find_node_info({"PET_NNODES": "1"}) is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PET_NODE_RANK", "2", "PET_NODE_RANK=2 of PET_NNODES=2"),
        ("PET_NPROC_PER_NODE", "auto", "PET_NPROC_PER_NODE='auto' is not a number"),
        ("PET_NPROC_PER_NODE", "0", "PET_NPROC_PER_NODE=0 is impossible"),
        ("PET_MASTER_ADDR", None, "the environment has PET_NNODES but no PET_MASTER_ADDR"),
    ],
)
def test_wrong_variables_of_a_node_are_named(name: str, value: str | None, message: str) -> None:
    variables = {key: text for key, text in VARIABLES.items() if key != name}
    with pytest.raises(MeshError, match=message):
        find_node_info(variables | ({} if value is None else {name: value}))


class Nodes:
    """A run on two nodes, on this machine."""

    def __init__(self, data: str, folder: Path, *options: str, ranks_per_node: int = 2) -> None:
        self.folder, self.ranks_per_node, self.port = folder, ranks_per_node, free_port()
        config = folder.parent / "run.toml"
        config.write_text(
            f'[data]\ntrain = "{data}"\nlanes = 8\nwindow = 24\n[model]\nhidden = 16\n'
            '[train]\nsteps = 30\nschedule = "constant"\n'
            f'[save]\nevery = 10\n[run]\ntimeout = 60\nfolder = "{folder}"\n'
        )
        self.command = [sys.executable, "-m", "stretto", "train", str(config), *options]
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, num_started: int = 2) -> "Nodes":
        shared = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": str(self.ranks_per_node), "PET_MASTER_ADDR": "127.0.0.1"}
        shared |= {"PET_MASTER_PORT": str(self.port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.processes = [
            subprocess.Popen(
                self.command, env={**os.environ, **shared, "PET_NODE_RANK": str(index)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for index in range(num_started)
        ]  # fmt: skip
        return self

    def finish(self, seconds: float = 100) -> tuple[list[int], str]:
        """Return the exit codes, and what both have printed."""
        try:
            outputs = [process.communicate(timeout=seconds)[0] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [process.returncode for process in self.processes], "\n".join(outputs)

    def await_step(self, step: int, seconds: float = 90) -> None:
        until = time.monotonic() + seconds
        while len(logged_losses(self.folder)) < step:
            assert all(process.poll() is None for process in self.processes), self.finish()
            if time.monotonic() > until:
                self.finish(0)  # kills them
            time.sleep(0.05)


LAYOUT = ("--layout.replicas", "4")


def stop_after_some_steps(nodes: Nodes) -> int:
    """Send SIGTERM to the second node; return the step that was saved."""
    nodes.start().await_step(5)
    nodes.processes[1].send_signal(signal.SIGTERM)
    codes, output = nodes.finish()
    assert codes == [75, 75], output
    saved = re.findall(r"stopped after step (\d+), as requested; that step is saved", output)
    assert saved == [str(len(logged_losses(nodes.folder)))], output
    return int(saved[0])


def is_listening(port: int) -> bool:
    with socket.socket() as connection:
        return not connection.connect_ex(("127.0.0.1", port))


def test_a_node_that_waits_for_another_ends_after_sigterm(byte_corpus: Corpus, tmp_path: Path) -> None:
    nodes = Nodes(byte_corpus.location, tmp_path / "run", *LAYOUT).start(num_started=1)
    until = time.monotonic() + 60
    while not is_listening(nodes.port):
        assert time.monotonic() < until and nodes.processes[0].poll() is None, nodes.finish(0)
        time.sleep(0.1)
    nodes.processes[0].send_signal(signal.SIGTERM)
    codes, output = nodes.finish(20)
    assert codes == [75] and "SIGTERM has ended the launcher" in output, output


@pytest.mark.long
@pytest.mark.short
def test_two_nodes_save_and_end_after_sigterm_to_one_of_them(byte_corpus: Corpus, tmp_path: Path) -> None:
    options = ("--layout.replicas", "2", "--train.steps", "100000", "--save.every", "100000")
    nodes = Nodes(byte_corpus.location, tmp_path / "run", *options, ranks_per_node=1)
    assert stop_after_some_steps(nodes) == find_checkpoint(tmp_path / "run").manifest.training_state.step >= 5


@pytest.mark.long
def test_two_nodes_resume_with_the_losses_of_one_rank(byte_corpus: Corpus, tmp_path: Path) -> None:
    nodes = Nodes(byte_corpus.location, tmp_path / "run", *LAYOUT, "--train.steps", "100000", "--save.every", "100000")
    saved = stop_after_some_steps(nodes)
    steps = ("--train.steps", str(saved + 5))
    codes, output = Nodes(byte_corpus.location, tmp_path / "run", *LAYOUT, *steps).start().finish()
    assert codes == [0, 0] and f"resume  after step {saved}" in output, output
    assert main(["train", str(tmp_path / "run.toml"), "--run.folder", str(tmp_path / "one"), *steps]) == 0
    assert logged_losses(tmp_path / "run") == pytest.approx(logged_losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.long
def test_if_a_rank_of_one_node_is_killed_all_nodes_end_with_the_code_for_a_restart(
    byte_corpus: Corpus, tmp_path: Path
) -> None:
    nodes = Nodes(byte_corpus.location, tmp_path / "run", *LAYOUT, "--train.steps", "100000").start()
    nodes.await_step(15)
    os.kill(children(nodes.processes[1].pid)[-1], signal.SIGKILL)
    codes, output = nodes.finish()
    assert codes == [75, 75], output
    assert "was killed by SIGKILL" in output, output


@pytest.mark.long
def test_a_mistake_ends_all_nodes_with_the_code_that_is_not_restarted(byte_corpus: Corpus, tmp_path: Path) -> None:
    codes, output = Nodes(byte_corpus.location, tmp_path / "run", *LAYOUT, "--data.lanes", "1").start().finish()
    assert codes == [2, 2], output
    codes, output = Nodes(byte_corpus.location, tmp_path / "run", "--layout.replicas", "3").start().finish()
    assert codes == [2, 2] and "the layout needs 3 ranks, but 2 nodes with 2 ranks each have 4" in output, output


@pytest.mark.long
def test_a_node_whose_first_node_is_missing_says_so(byte_corpus: Corpus, tmp_path: Path) -> None:
    nodes = Nodes(byte_corpus.location, tmp_path / "run", *LAYOUT, "--run.timeout", "4").start()
    first = nodes.processes.pop(0)
    first.kill()
    first.communicate()
    codes, output = nodes.finish()
    assert codes == [75] and "node 1 can't connect to node 0 at 127.0.0.1" in output, output
