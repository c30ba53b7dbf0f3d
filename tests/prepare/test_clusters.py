"""Clusters of Ray, Dask and MPI, each real and on this machine: the same bytes as from one process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.prepared_files import content, make_preparation
from stretto.errors import DataError
from stretto.prepare.executors import open_executor
from stretto.prepare.prepare_job import Progress

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def ray_nodes() -> Iterator[tuple[Any, Any]]:
    """A cluster with a head and one more node; both are processes of their own."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        yield cluster, cluster.add_node(num_cpus=1)
    finally:
        cluster.shutdown()


def test_two_ray_nodes_write_the_same_bytes_though_one_is_killed_in_the_middle(
    ray_nodes: tuple[Any, Any], tmp_path: Path
) -> None:
    cluster, node = ray_nodes
    preparation = make_preparation("text", tmp_path / "in", 1500)
    preparation.run(tmp_path / "plain", workers=1)
    killed_at: list[Progress] = []

    def kill(progress: Progress) -> None:
        if progress.phase.startswith("writing") and progress.done > progress.total // 4 and not killed_at:
            killed_at.append(progress)
            cluster.remove_node(node, allow_graceful=False)

    with open_executor(f"ray={cluster.address}") as executor:
        preparation.run(tmp_path / "ray", executor, on_progress=kill)
    assert killed_at[0].done < killed_at[0].total
    assert content(tmp_path / "ray") == content(tmp_path / "plain")


def test_an_error_on_ray_is_that_of_one_process(ray_nodes: tuple[Any, Any], tmp_path: Path) -> None:
    cluster, _ = ray_nodes
    preparation = make_preparation("series", tmp_path / "in")
    preparation.files[4].write_text(preparation.files[4].read_text() + "\n1,red,3")
    with pytest.raises(DataError) as plain:
        preparation.run(tmp_path / "plain", workers=1)
    with open_executor(f"ray={cluster.address}") as executor, pytest.raises(DataError) as on_ray:
        preparation.run(tmp_path / "ray", executor)
    assert str(on_ray.value) == str(plain.value)
    assert type(on_ray.value) is DataError


@pytest.mark.parametrize("kind", ["text", "sequences", "series"])
def test_a_dask_cluster_writes_the_same_bytes(kind: str, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    preparation = make_preparation(kind, tmp_path / "in")
    preparation.run(tmp_path / "plain", workers=1)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        open_executor(f"dask={cluster.scheduler_address}") as executor,
    ):
        preparation.run(tmp_path / "dask", executor)
    assert content(tmp_path / "dask") == content(tmp_path / "plain")


def test_the_command_runs_on_a_dask_cluster_and_says_if_there_is_none(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    preparation = make_preparation("text", tmp_path / "in")
    preparation.run(tmp_path / "plain", workers=1)
    command = [
        sys.executable,
        "-m",
        "stretto",
        "prepare",
        *preparation.command,
        "--out",
        str(tmp_path / "dask"),
        "--on",
    ]
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        subprocess.run([*command, f"dask={cluster.scheduler_address}"], check=True)
    assert content(tmp_path / "dask") == content(tmp_path / "plain")
    failed = subprocess.run([*command, "dask=127.0.0.1:1"], check=False, capture_output=True, text=True)
    assert failed.returncode == 2 and "--on=dask=127.0.0.1:1 can't be reached" in failed.stderr


def test_processes_of_mpi_write_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    preparation = make_preparation("sequences", tmp_path / "in")
    preparation.run(tmp_path / "plain", workers=1)
    script = tmp_path / "prepare.py"
    script.write_text(
        "from mpi4py.futures import MPIPoolExecutor\n"
        "from stretto.data import SequenceOptions, prepare_sequences\n"
        "if __name__ == '__main__':\n"
        "    options = SequenceOptions(level='word', label='label', validation_fraction=0.3, shard_bytes=600)\n"
        f"    file, folder = {str(preparation.files[0])!r}, {str(tmp_path / 'mpi')!r}\n"
        "    with MPIPoolExecutor() as executor:\n"
        "        prepare_sequences(file, folder, options, executor=executor)\n"
    )
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun), "--oversubscribe", "-n", "3", sys.executable, "-m", "mpi4py.futures", str(script)]
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert content(tmp_path / "mpi") == content(tmp_path / "plain")
