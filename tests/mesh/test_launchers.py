"""Ranks that a cluster's launcher has started: they connect, agree, and listen only at the given address."""

import json
import os
import socket
import stat
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from helpers.fault_loss import logged_losses
from stretto.cli.main import main
from stretto.data import Corpus
from stretto.errors import MeshError
from stretto.launch.rank_environment import free_port
from stretto.mesh.launch_info import LaunchInfo
from stretto.mesh.store import listen_at, open_store


def tf_configs(size: int) -> list[dict[str, str]]:
    cluster = {"chief": [f"127.0.0.1:{free_port()}"], "worker": [f"127.0.0.1:{free_port()}" for _ in range(size - 1)]}
    tasks = [{"type": "chief", "index": 0}, *({"type": "worker", "index": index} for index in range(size - 1))]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]


def start(environment: dict[str, str], *command: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.long
def test_training_on_workers_of_tf_config_equals_one_rank(byte_corpus: Corpus, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 4\nwindow = 16\n[model]\nhidden = 8\n[train]\nsteps = 3\n'
        f'[run]\ntimeout = 60\nfolder = "{tmp_path / "one"}"\n'
    )
    assert main(["train", str(config)]) == 0
    options = ["--run.folder", str(tmp_path / "two"), "--layout.replicas", "2"]
    ranks = [start(variables, "-m", "stretto", "train", str(config), *options) for variables in tf_configs(2)]
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    # Nothing is printed about the store, which ends with rank 0: it leaves last.
    assert [(rank.returncode, err) for rank, (_, err) in zip(ranks, outputs, strict=True)] == [(0, ""), (0, "")], (
        outputs
    )
    # They sign their messages with a secret that rank 0 has created.
    assert stat.S_IMODE((tmp_path / "two" / "secret").stat().st_mode) == 0o600
    assert logged_losses(tmp_path / "two") == pytest.approx(logged_losses(tmp_path / "one"), rel=1e-5)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MeshError, match=f"port {port} on localhost is in use"):
            listen_at("localhost", port, is_single_node=True)


def test_a_store_that_cannot_be_hosted_is_an_error_with_a_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        # The name is loopback here and other hosts are to connect, so torch listens on all addresses, and fails.
        launch_info = LaunchInfo(0, 2, 0, 1, "localhost", taken.getsockname()[1])
        with pytest.raises(
            MeshError, match=r"this node can't host the key-value store .*; set MASTER_ADDR and"
        ) as error:
            open_store(launch_info, timedelta(seconds=2))
    assert "\n" not in str(error.value)


def test_a_name_that_resolves_to_loopback_is_not_bound_if_other_hosts_are_to_connect() -> None:
    assert listen_at("localhost", 0, is_single_node=False) is None
    assert listen_at("192.0.2.1", 0, is_single_node=False) is None  # an address of no host
    assert listen_at("no-such-host.invalid", 0, is_single_node=True) is None
    with listen_at("localhost", 0, is_single_node=True) as listening:  # type: ignore[union-attr]
        assert listening.getsockname()[0] == "127.0.0.1"


def test_a_store_that_listens_on_all_interfaces_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    open_store(LaunchInfo(0, 2, 0, 2, "localhost", free_port()), timedelta(seconds=5))
    assert not caplog.records
    open_store(LaunchInfo(0, 2, 0, 1, "localhost", free_port()), timedelta(seconds=5))
    (message,) = caplog.messages
    assert message.startswith(
        "the key-value store on this node listens on all interfaces, because localhost is loopback here"
    )
