"""What each launcher sets in the environment, and what is read from it."""

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import MeshError
from stretto.mesh.launch_info import LaunchInfo, expand_counts, find_launch_info, first_host

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "first",
}


def tf_config(kind: str, index: object, **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def where(launch_info: LaunchInfo | None) -> tuple[int, int, int, int, str, int]:
    assert launch_info is not None
    return (
        launch_info.rank,
        launch_info.size,
        launch_info.local_rank,
        launch_info.local_size,
        launch_info.address,
        launch_info.port,
    )


def test_without_a_launcher_there_is_no_launch_info() -> None:
    assert find_launch_info({"HOME": "/root", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}) is None


def test_torchrun_wins_over_all_other_launchers() -> None:
    launch_info = find_launch_info({**MPIRUN, **SRUN, **tf_config("ps", 0), **TORCHRUN})
    assert where(launch_info) == (1, 4, 1, 2, "10.0.0.1", 29500)


@pytest.mark.parametrize("absent", [name for name in TORCHRUN if name not in ("RANK",)])
def test_a_missing_variable_of_torchrun_is_an_error(absent: str) -> None:
    with pytest.raises(MeshError, match=f"but no {absent}; start the ranks with torchrun"):
        find_launch_info({name: value for name, value in TORCHRUN.items() if name != absent})


def test_a_rank_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(MeshError, match="RANK='one' is not a number"):
        find_launch_info({**TORCHRUN, "RANK": "one"})


@pytest.mark.parametrize(("name", "value"), [("RANK", "4"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "2"), ("RANK", "-1")])
def test_an_impossible_rank_is_an_error(name: str, value: str) -> None:
    with pytest.raises(MeshError, match="which is impossible"):
        find_launch_info({**TORCHRUN, name: value})


def test_workers_of_tf_config_are_ranks_that_meet_at_the_first_ones_port() -> None:
    workers = ["a:2222", "b:2223", "a:2224"]
    assert where(find_launch_info(tf_config("worker", 0, worker=workers))) == (0, 3, 0, 2, "a", 2222)
    assert where(find_launch_info(tf_config("worker", 1, worker=workers))) == (1, 3, 0, 1, "a", 2222)
    assert where(find_launch_info(tf_config("worker", "2", worker=workers))) == (2, 3, 1, 2, "a", 2222)


@pytest.mark.parametrize("name", ["chief", "master"])
def test_the_chief_is_the_first_worker(name: str) -> None:
    cluster = {"worker": ["b:1", "c:1"], name: ["[fe80::1]:7"]}
    assert where(find_launch_info(tf_config(name, 0, **cluster))) == (0, 3, 0, 1, "fe80::1", 7)
    assert where(find_launch_info(tf_config("worker", 1, **cluster))) == (2, 3, 0, 1, "fe80::1", 7)


@pytest.mark.parametrize("alone", [tf_config("worker", 0, worker=["a:1"]), {"TF_CONFIG": "{}"}])
def test_a_single_worker_has_no_launch_info(alone: dict[str, str]) -> None:
    assert find_launch_info(alone) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (tf_config("ps", 0, worker=["a:1"], ps=["b:1"]), "remove ps from the cluster"),
        (tf_config("worker", 0, worker=["a:1", "c:1"], ps=["b:1"]), "remove ps from the cluster"),
        (tf_config("evaluator", 0, worker=["a:1", "b:1"]), "start only the chief and the workers"),
        (tf_config("worker", 2, worker=["a:1", "b:1"]), "this task worker 2, which its cluster does not have"),
        (tf_config("worker", 0, worker=["a", "b:1"]), "TF_CONFIG has 'a', which is not host:port"),
        ({"TF_CONFIG": "{worker: a}"}, "can't be read; use"),
        ({"TF_CONFIG": "[1]"}, "can't be read; use"),
        ({"TF_CONFIG": '{"cluster": {"worker": 3}}'}, "can't be read; use"),
    ],
)
def test_an_unsupported_cluster_is_refused_with_a_remedy(variables: dict[str, str], message: str) -> None:
    with pytest.raises(MeshError, match=message) as error:
        find_launch_info(variables)
    assert "\n" not in str(error.value)


def test_the_variables_of_srun_are_read() -> None:
    launch_info = find_launch_info(SRUN)
    assert where(launch_info)[:5] == (3, 5, 1, 2, "gpu07")
    other = find_launch_info({**SRUN, "SLURM_STEP_ID": "1"})
    assert launch_info is not None and other is not None
    # Steps that run side by side use different ports.
    assert 10_000 <= launch_info.port < 30_000 and launch_info.port != other.port
    overridden = find_launch_info({**SRUN, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"})
    assert where(overridden) == (3, 5, 1, 2, "10.0.0.7", 4000)
    # The remedy for a list that can't be read works.
    assert where(find_launch_info({**SRUN, "SLURM_STEP_NODELIST": "", "MASTER_ADDR": "gpu07"}))[4] == "gpu07"


@pytest.mark.parametrize("absent", [name for name in SRUN if name != "SLURM_STEP_NUM_TASKS"])
def test_a_missing_variable_of_srun_is_an_error(absent: str) -> None:
    with pytest.raises(MeshError, match=f"has no {absent}"):
        find_launch_info({name: value for name, value in SRUN.items() if name != absent})


def test_the_variables_of_mpirun_are_read_even_within_a_step_of_srun() -> None:
    assert where(find_launch_info({**SRUN, **MPIRUN})) == (3, 4, 1, 2, "first", 29500)
    without_address = {name: value for name, value in MPIRUN.items() if name != "MASTER_ADDR"}
    with pytest.raises(MeshError, match="add -x MASTER_ADDR=HOST"):
        find_launch_info(without_address)
    on_one = {**without_address, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert where(find_launch_info(on_one)) == (1, 2, 1, 2, "127.0.0.1", 29500)


def run_of(variables: dict[str, str]) -> str:
    launch_info = find_launch_info(variables)
    assert launch_info is not None
    return launch_info.run_id


def test_ranks_of_one_job_have_the_same_run_id_and_other_jobs_a_different_one() -> None:
    assert run_of(SRUN) == run_of({**SRUN, "SLURM_PROCID": "0"}) == "812.0"
    assert run_of({**SRUN, "SLURM_STEP_ID": "1"}) == "812.1"
    mpirun = {**MPIRUN, "PMIX_NAMESPACE": "prterun-host-7@1"}
    assert run_of(mpirun) == run_of({**mpirun, "OMPI_COMM_WORLD_RANK": "1"}) == "prterun-host-7@1"
    runs = [run_of(tf_config("worker", index, worker=["a:1", "b:1"])) for index in range(2)]
    assert runs[0] == runs[1] != run_of(tf_config("worker", 0, worker=["a:1", "c:1"]))


@pytest.mark.parametrize("variables", [SRUN, MPIRUN, tf_config("worker", 0, worker=["a:1", "a:2"]), TORCHRUN])
def test_ranks_are_bound_to_devices_only_by_launchers_that_choose_them(variables: dict[str, str]) -> None:
    free, bound = find_launch_info(variables), find_launch_info({**variables, "CUDA_VISIBLE_DEVICES": "0"})
    assert free is not None and bound is not None and not free.has_own_devices
    # torchrun chooses none; its caller has chosen for all ranks together.
    assert bound.has_own_devices == (variables is not TORCHRUN)


def test_workers_of_ray_train_have_a_process_group_but_not_those_of_torchrun_on_ray() -> None:
    variables = {name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC")}
    worker = find_launch_info({**variables, "RAY_JOB_ID": "01000000"})
    plain = find_launch_info({**TORCHRUN, "TORCHELASTIC_RUN_ID": "run1", "RAY_JOB_ID": "01000000"})
    assert worker is not None and plain is not None
    assert worker.has_process_group and not worker.has_agent_store and not plain.has_process_group
    assert (worker.rank, worker.size, worker.port) == (plain.rank, plain.size, plain.port)
    assert worker.launch_command.format(3) == "ScalingConfig(num_workers=3)"


numbers = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=3)
pieces = st.one_of(st.from_regex(r"[a-z][a-z0-9-]{0,4}", fullmatch=True), numbers)


@given(st.lists(st.lists(pieces, min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_first_host_is_the_first_of_the_expanded_list(lists: list[list[str | list[tuple[int, int]]]]) -> None:
    written, expanded = [], []
    for parts in lists:
        text, options = "", []
        for part in parts:
            if isinstance(part, str):
                text += part
                options.append([part])
                continue
            text += "[" + ",".join(f"{low:02}-{low + more:02}" if more else f"{low:02}" for low, more in part) + "]"
            options.append([f"{number:02}" for low, more in part for number in range(low, low + more + 1)])
        written.append(text)
        expanded += ["".join(host) for host in product(*options)]
    assert first_host(",".join(written)) == expanded[0]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_tasks_per_node_are_expanded(runs: list[tuple[int, int]]) -> None:
    written = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(written) == [count for count, times in runs for _ in range(times)]


def test_malformed_slurm_lists_are_refused() -> None:
    with pytest.raises(MeshError, match="set MASTER_ADDR"):
        first_host("")
    with pytest.raises(MeshError, match="can't be read"):
        expand_counts("2x3")
