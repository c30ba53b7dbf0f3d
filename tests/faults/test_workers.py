"""Two hosts without torchrun: TF_CONFIG workers, and a store that listens only at the first host's address."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.fault_loss import logged_losses
from helpers.network_hosts import ADDRESSES, HostPair, two_hosts
from stretto.cli.main import main
from stretto.data import Corpus

pytestmark = pytest.mark.faults
PORT = 29512


def start(hosts: HostPair, index: int, command: list[str]) -> "subprocess.Popen[str]":
    workers = [f"{ADDRESSES[name]}:{PORT}" for name in hosts.names]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    name = hosts.names[index]
    environment = {"TF_CONFIG": json.dumps(config), "GLOO_SOCKET_IFNAME": hosts.device(name), "OMP_NUM_THREADS": "1"}
    return hosts.run(name, command, environment)


def test_tf_config_workers_on_two_hosts_have_the_losses_of_one_rank(byte_corpus: Corpus, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 4\nwindow = 16\n[model]\nhidden = 8\n[train]\nsteps = 3\n'
        f'[run]\ntimeout = 90\nfolder = "{tmp_path / "one"}"\n'
    )
    assert main(["train", str(config)]) == 0
    options = ["--run.folder", str(tmp_path / "two"), "--layout.replicas", "2"]
    command = [sys.executable, "-m", "stretto", "train", str(config), *options]
    with two_hosts(tmp_path) as hosts:
        first = start(hosts, 0, command)
        until, listening = time.monotonic() + 60, ""
        while f":{PORT}" not in listening and time.monotonic() < until:
            time.sleep(0.1)
            show = ["ip", "netns", "exec", hosts.names[0], "ss", "-ltnH"]
            listening = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        second = start(hosts, 1, command)
        outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    addresses = [row.split()[3] for row in listening.splitlines() if f":{PORT}" in row]
    assert addresses == [f"{ADDRESSES['strettoA']}:{PORT}"]
    assert logged_losses(tmp_path / "two") == pytest.approx(logged_losses(tmp_path / "one"), rel=1e-5)
