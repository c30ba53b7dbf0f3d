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


def test_nobody_has_started_us() -> None:
    assert find_launch_info({"HOME": "/root", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}) is None


def test_what_torchrun_sets_is_read_and_wins_over_all_others() -> None:
    launch_info = find_launch_info({**MPIRUN, **SRUN, **tf_config("ps", 0), **TORCHRUN})
    assert where(launch_info) == (1, 4, 1, 2, "10.0.0.1", 29500)


@pytest.mark.parametrize("absent", [name for name in TORCHRUN if name not in ("RANK",)])
def test_half_an_environment_is_a_mistake(absent: str) -> None:
    with pytest.raises(MeshError, match=f"but no {absent}; start the ranks with torchrun"):
        find_launch_info({name: value for name, value in TORCHRUN.items() if name != absent})


def test_an_environment_that_is_no_number_is_a_mistake() -> None:
    with pytest.raises(MeshError, match="is not a number"):
        find_launch_info({**TORCHRUN, "RANK": "one"})


@pytest.mark.parametrize(("name", "value"), [("RANK", "4"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "2"), ("RANK", "-1")])
def test_a_rank_that_is_not_among_them_is_a_mistake(name: str, value: str) -> None:
    with pytest.raises(MeshError, match="which can't be"):
        find_launch_info({**TORCHRUN, name: value})


def test_a_worker_of_tf_config_is_a_rank_and_the_first_ones_port_is_where_they_meet() -> None:
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
def test_one_worker_alone_was_not_placed_by_anyone(alone: dict[str, str]) -> None:
    assert find_launch_info(alone) is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (tf_config("ps", 0, worker=["a:1"], ps=["b:1"]), "leave ps out of the cluster"),
        (tf_config("worker", 0, worker=["a:1", "c:1"], ps=["b:1"]), "leave ps out of the cluster"),
        (tf_config("evaluator", 0, worker=["a:1", "b:1"]), "start the chief and the workers only"),
        (tf_config("worker", 2, worker=["a:1", "b:1"]), "this is worker 2, but its cluster has no such task"),
        (tf_config("worker", 0, worker=["a", "b:1"]), "a worker at 'a', without a port"),
        ({"TF_CONFIG": "{worker: a}"}, "is not understood; it should be"),
        ({"TF_CONFIG": "[1]"}, "is not understood; it should be"),
        ({"TF_CONFIG": '{"cluster": {"worker": 3}}'}, "is not understood; it should be"),
    ],
)
def test_a_cluster_that_is_none_of_ours_is_refused_in_a_sentence(variables: dict[str, str], said: str) -> None:
    with pytest.raises(MeshError, match=said) as error:
        find_launch_info(variables)
    assert "\n" not in str(error.value)


def test_what_srun_sets_is_read() -> None:
    launch_info = find_launch_info(SRUN)
    assert where(launch_info)[:5] == (3, 5, 1, 2, "gpu07")
    other = find_launch_info({**SRUN, "SLURM_STEP_ID": "1"})
    assert launch_info is not None and other is not None
    # Steps that run side by side don't meet at one port.
    assert 10_000 <= launch_info.port < 30_000 and launch_info.port != other.port
    asked = find_launch_info({**SRUN, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"})
    assert where(asked) == (3, 5, 1, 2, "10.0.0.7", 4000)


@pytest.mark.parametrize("absent", [name for name in SRUN if name != "SLURM_STEP_NUM_TASKS"])
def test_half_of_what_srun_sets_is_a_mistake(absent: str) -> None:
    with pytest.raises(MeshError, match=f"has no {absent}"):
        find_launch_info({name: value for name, value in SRUN.items() if name != absent})


def test_what_mpirun_sets_is_read_even_within_a_step_of_srun() -> None:
    assert where(find_launch_info({**SRUN, **MPIRUN})) == (3, 4, 1, 2, "first", 29500)
    there = {name: value for name, value in MPIRUN.items() if name != "MASTER_ADDR"}
    with pytest.raises(MeshError, match="add -x MASTER_ADDR=HOST"):
        find_launch_info(there)
    on_one = {**there, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert where(find_launch_info(on_one)) == (1, 2, 1, 2, "127.0.0.1", 29500)


def run_of(variables: dict[str, str]) -> str:
    launch_info = find_launch_info(variables)
    assert launch_info is not None
    return launch_info.run_id


def test_ranks_of_one_job_have_one_name_for_it_and_those_of_others_another() -> None:
    assert run_of(SRUN) == run_of({**SRUN, "SLURM_PROCID": "0"}) == "812.0"
    assert run_of({**SRUN, "SLURM_STEP_ID": "1"}) == "812.1"
    mpirun = {**MPIRUN, "PMIX_NAMESPACE": "prterun-host-7@1"}
    assert run_of(mpirun) == run_of({**mpirun, "OMPI_COMM_WORLD_RANK": "1"}) == "prterun-host-7@1"
    runs = [run_of(tf_config("worker", index, worker=["a:1", "b:1"])) for index in range(2)]
    assert runs[0] == runs[1] != run_of(tf_config("worker", 0, worker=["a:1", "c:1"]))


@pytest.mark.parametrize("variables", [SRUN, MPIRUN, tf_config("worker", 0, worker=["a:1", "a:2"]), TORCHRUN])
def test_a_device_is_a_ranks_own_only_where_the_launcher_has_chosen_it(variables: dict[str, str]) -> None:
    free, bound = find_launch_info(variables), find_launch_info({**variables, "CUDA_VISIBLE_DEVICES": "0"})
    assert free is not None and bound is not None and not free.is_bound
    # torchrun chooses none, and whoever called it has chosen for all its ranks together.
    assert bound.is_bound == (variables is not TORCHRUN)


numbers = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=3)
pieces = st.one_of(st.from_regex(r"[a-z][a-z0-9-]{0,4}", fullmatch=True), numbers)


@given(st.lists(st.lists(pieces, min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_first_host_is_that_of_the_whole_list(lists: list[list[str | list[tuple[int, int]]]]) -> None:
    written, whole = [], []
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
        whole += ["".join(host) for host in product(*options)]
    assert first_host(",".join(written)) == whole[0]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_tasks_of_nodes_are_counted(runs: list[tuple[int, int]]) -> None:
    written = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(written) == [count for count, times in runs for _ in range(times)]


def test_lists_that_are_not_slurms_are_refused() -> None:
    with pytest.raises(MeshError, match="set MASTER_ADDR"):
        first_host("")
    with pytest.raises(MeshError, match="is not understood"):
        expand_counts("2x3")
