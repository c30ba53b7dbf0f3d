"""Findings about this machine, with real parts: processes, folders, ranks."""

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.output import without_gloo_lines
from helpers.rank_pool import RankPools
from stretto import World
from stretto.cli.main import main
from stretto.launch import Finding, doctor, link_checks, machine
from stretto.launch.doctor import check_machine
from stretto.launch.finding import ok, run_check
from stretto.launch.folders import check_folder
from stretto.launch.probe import ProbeFailedError, driver_cuda_version, probe_torch
from stretto.launch.rank_environment import free_port


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


def test_a_check_that_hangs_is_a_finding_in_time() -> None:
    def hang() -> list[Finding]:
        time.sleep(60)
        return []

    started = time.monotonic()
    (found,) = run_check("disk", hang, 0.2)
    assert time.monotonic() - started < 5
    assert (found.name, found.level, found.detail) == ("disk", "problem", "no answer within 0 s") and found.remedy


def test_a_check_that_fails_is_a_finding() -> None:
    def broken() -> list[Finding]:
        raise OSError("the driver is gone\nand more")

    (found,) = run_check("devices", broken, 5)
    assert found.level == "problem" and found.detail == "the check failed (OSError: the driver is gone)"


def test_a_torch_that_cannot_be_imported_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (found,) = machine.check_torch(60)
    assert found.level == "problem" and "libcudart.so" in found.detail
    # The other checks still run.
    findings = check_machine()
    assert levels(findings)["torch"] == "problem" and levels(findings)["loopback"] == "ok"


def test_a_torch_that_ends_the_process_or_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    with pytest.raises(ProbeFailedError, match=r"exit code -6|Aborted"):
        probe_torch(60)
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    with pytest.raises(ProbeFailedError, match="took more than 1 s"):
        probe_torch(1)


@pytest.mark.parametrize(("version", "level"), [("2.13.0+cpu", "ok"), ("2.9.1", "problem"), ("3.0", "ok")])
def test_an_old_torch_is_a_problem(version: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"version": version, "cuda": None, "hip": None, "backends": ["gloo"], "devices": [], "error": None}
    monkeypatch.setattr(machine, "probe_torch", lambda seconds: told)
    assert levels(machine.check_torch(1))["torch"] == level


def test_a_broken_device_is_a_problem_and_a_full_one_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[dict[str, Any]] = [
        {"name": "A", "error": None, "free": 70e9, "total": 80e9},
        {"name": "B", "error": "no kernel image is available"},
        {"name": "C", "error": None, "free": 1e9, "total": 80e9},
    ]
    told = {"version": "2.13.0", "cuda": "13.0", "hip": None, "backends": ["gloo", "nccl"], "devices": devices}
    monkeypatch.setattr(machine, "probe_torch", lambda seconds: {**told, "error": None, "driver": "13.0"})
    found = levels(machine.check_torch(1))
    assert [found[f"device {number}"] for number in range(3)] == ["ok", "problem", "warning"]


def test_a_gpu_of_amd_is_never_answered_with_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [{"name": "A", "error": None, "free": 1e9, "total": 80e9}]
    probe = {"version": "2.13.0", "cuda": None, "hip": "7.0", "backends": ["gloo"], "devices": devices, "driver": None}
    monkeypatch.setattr(machine, "probe_torch", lambda seconds: {**probe, "error": None})
    assert "`rocm-smi`" in machine.check_torch(1)[1].remedy


@pytest.mark.parametrize(
    ("limits", "level", "detail"),
    [
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", "no limit"),
        ((1024, resource.RLIM_INFINITY), "ok", "1,024 per process"),
        ((1023, 4096), "warning", "1,023 per process, can be raised to 4,096"),
        ((255, 4096), "problem", "255 per process, can be raised to 4,096"),
    ],
)
def test_a_low_limit_of_open_files_is_a_finding(
    limits: tuple[int, int], level: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    (finding,) = machine.check_open_files()
    assert (finding.level, finding.detail) == (level, detail)


def test_a_folder_is_used_and_left_as_it_was(tmp_path: Path) -> None:
    found = check_folder("run folder", tmp_path / "runs" / "first")
    assert levels(found) == {"run folder": "ok", "run folder, disk": "ok", "run folder, locks": "ok"}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_problem() -> None:
    (found,) = check_folder("run folder", Path("/proc/runs"))
    assert found.level == "problem" and "can't write to /proc" in found.detail


@pytest.mark.parametrize("inner", ["", "run"])
def test_a_folder_that_is_a_file_is_a_problem(tmp_path: Path, inner: str) -> None:
    (tmp_path / "runs").touch()
    (found,) = check_folder("run folder", tmp_path / "runs" / inner)
    assert found.level == "problem" and found.detail == f"{tmp_path / 'runs'} is not a folder"


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("PYTHONOPTIMIZE", "1", "$PYTHONOPTIMIZE"),
        ("NCCL_P2P_DISABLE", "1", "$NCCL_P2P_DISABLE"),
        ("GLOO_SOCKET_IFNAME", "eth7", "$GLOO_SOCKET_IFNAME"),
        ("https_proxy", "http://proxy:8080", "$https_proxy"),
    ],
)
def test_a_risky_variable_is_a_warning(name: str, value: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv(name, value)
    found = {finding.name: finding for finding in machine.check_environment()}
    assert found[what].level == "warning" and found[what].remedy


def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    (found,) = machine.check_cores()
    assert found.level == "warning" and "set OMP_NUM_THREADS to" in found.remedy


def test_the_remedy_for_busy_cores_names_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 1000.0, 1000.0))
    monkeypatch.setattr(os, "cpu_count", lambda: len(os.sched_getaffinity(0)))
    monkeypatch.setattr(machine, "_cpu_limit", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (found,) = machine.check_cores()
    assert found.level == "warning" and "end other processes, or set OMP_NUM_THREADS=1" in found.remedy
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (found,) = machine.check_cores()
    assert found.level == "warning" and "OMP_NUM_THREADS" not in found.remedy


def test_a_master_address_without_a_launcher_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host0")
    assert levels(machine.check_environment())["$MASTER_ADDR"] == "warning"
    # mpirun's ranks on several hosts need it.
    for name, value in {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert "$MASTER_ADDR" not in levels(machine.check_environment())


def test_every_optional_package_is_listed() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {name: packages for name, packages in project["optional-dependencies"].items() if name != "all"}
    packages = [re.split(r"\[|>=", package)[0] for packages in extras.values() for package in packages]
    modules = {name.removesuffix("-skinny").replace("-", "." if "opentelemetry" in name else "_") for name in packages}
    assert modules == set(machine._EXTRAS)


def test_page_cache_of_a_container_counts_as_free_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert machine.container_memory(tmp_path) == (1000, 900)
    (tmp_path / "memory.stat").write_text("anon 200\nfile 700\ninactive_file 650\nactive_file 50\n")
    assert machine.container_memory(tmp_path) == (1000, 250)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.container_memory(tmp_path) is None


def told(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"host": "a", "versions": {"torch": "2.13.0", "numpy": "2.4"}, "clock": 100.0, "findings": [], **changes}


def test_versions_that_differ_are_a_problem_that_names_the_host() -> None:
    other = told(host="b", versions={"torch": "2.12.0", "numpy": "2.4"})
    found = link_checks._compare_versions([told(), told(), other])
    assert found.level == "problem" and found.detail == "torch 2.12.0 on b (rank 2), 2.13.0 on a"
    assert link_checks._compare_versions([told(), told()]).level == "ok"


@pytest.mark.parametrize(("clock", "level"), [(100.2, "ok"), (97.0, "warning"), (1000.0, "problem")])
def test_clocks_that_differ_are_a_finding(clock: float, level: str) -> None:
    found = link_checks._compare_clocks([told(), told(host="b", clock=clock)])
    assert found.level == level and (level == "ok" or "clock of b" in found.remedy)


@pytest.mark.parametrize(
    ("latency", "bandwidth", "level"), [(5e-5, 2e9, "ok"), (0.1, 2e9, "warning"), (5e-5, 1e6, "warning")]
)
def test_a_slow_link_is_a_warning(latency: float, bandwidth: float, level: str) -> None:
    link = {"target": 1, "latency": latency, "bandwidth": bandwidth, "is_same_node": True, "device": "cpu"}
    assert levels(link_checks.link_findings([link])) == {"link 0-1": level}


def _meet(world: World) -> tuple[list[Finding], list[dict[str, Any]]]:
    own = [ok("memory", f"of rank {world.rank}")]
    # As if each rank ran on a different machine.
    return link_checks.gather_findings(world, 0, own), link_checks.measure_rank_zero_links(world, 1)


@pytest.mark.long
@pytest.mark.short
def test_rank_0_gathers_the_findings_of_every_machine(pools: RankPools) -> None:
    first, second = pools[2].run(_meet)
    assert [finding.detail for finding in first[0][:2]] == ["of rank 0", "of rank 1"]
    assert levels(first[0][2:]) == {"versions": "ok", "clocks": "ok"} and all(finding.host for finding in first[0][:2])
    assert [link["target"] for link in first[1]] == [1] and all(link["latency"] > 0 for link in first[1])
    assert [replace(finding, host="") for finding in second[0]] == [ok("memory", "of rank 1")]


def test_ranks_wait_for_each_other_as_long_as_all_checks_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def record(what: str, check: object, seconds: float) -> list[Finding]:
        limits.append(seconds)
        return []

    monkeypatch.setattr(doctor, "run_check", record)
    check_machine()
    assert len(limits) > 10 and doctor.rendezvous_timeout(None).total_seconds() == sum(limits) + 90


def test_links_within_and_between_machines_are_told_apart(pools: RankPools) -> None:
    # Three ranks on the first machine and one on the second; each knows only its own machine.
    for measured in pools[4].run(_unequal):
        assert [(link["target"], link["is_same_node"]) for link in measured] == [(1, True), (3, False)]


def _unequal(world: World) -> list[dict[str, Any]]:
    return link_checks.measure_rank_zero_links(world, 1 if world.rank == 3 else 3)


@pytest.mark.long
def test_doctor_on_ranks_of_a_launcher_prints_one_report(tmp_path: Path) -> None:
    cluster = {"worker": [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]}
    ranks = []
    for index in range(2):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "stretto", "doctor", "--json", f"{index}.json"], cwd=tmp_path, text=True,
                env={**os.environ, "TF_CONFIG": json.dumps(task)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    said = [rank.communicate(timeout=200) for rank in ranks]
    assert without_gloo_lines("".join(said[1])) == "" and "problem" in said[0][0].splitlines()[-1], said
    found = levels([Finding(**finding) for finding in json.loads((tmp_path / "0.json").read_text())])
    assert found["versions"] == found["clocks"] == "ok" and "link 0-1" in found
    assert not (tmp_path / "1.json").exists()


def test_ranks_are_started_on_the_given_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def record(ranks: int, device: str, seconds: float) -> list[Finding]:
        asked.append(device)
        return []

    monkeypatch.setattr(link_checks, "check_links", record)
    monkeypatch.setattr(doctor, "check_machine", lambda config, on_check: [])
    assert main(["doctor", "--device", "cuda:1"]) == main(["doctor"]) == 0
    assert asked == ["cuda:1", "cpu"]


@pytest.mark.long
def test_doctor_starts_ranks_and_exits_with_1_only_for_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "stretto", "doctor", "--json", "found.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250)
    found = levels([Finding(**finding) for finding in json.loads((tmp_path / "found.json").read_text())])
    assert done.returncode == ("problem" in found.values()), done.stdout
    assert found["python"] == found["torch"] == found["loopback"] == "ok" and "link 0-1" in found
    assert "problem" in done.stdout.splitlines()[-1]


def test_a_problem_ends_in_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('[data]\ntrain = "data"\n[run]\nfolder = "/proc/run"\n')
    assert main(["doctor", "--run", "run.toml", "--ranks", "1"]) == 1
    said = capsys.readouterr()
    assert "problem: run folder: choose a different folder" in said.out and said.err == ""


def test_an_invalid_option_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks", "0"]) == 2
    assert capsys.readouterr().err == "stretto: error: --ranks=0 must be at least 1; 1 launches no ranks\n"


def test_the_version_of_the_cuda_driver_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, version: Any) -> int:  # noqa: ANN401, N802 - the driver's name for it
            version._obj.value = 12080
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    assert driver_cuda_version() == "12.8"
