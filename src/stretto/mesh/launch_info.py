"""LaunchInfo: this process's rank among those that a launcher has started, read from the environment.

Launchers are tried in this order: torchrun (or Ray Train, which sets the same variables), TF_CONFIG, Open MPI's mpirun,
Slurm's srun. So the innermost one wins: mpirun may run inside srun, and torchrun inside any of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stretto.base.errors import MeshError
from stretto.base.fingerprint import fingerprint

# torchrun's default for MASTER_PORT.
_DEFAULT_PORT = 29500
# Launchers set these to limit the devices that a process sees.
_VISIBLE_DEVICES_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(frozen=True)
class LaunchInfo:
    """One rank, and the address of the key-value store where all ranks rendezvous."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this node
    local_size: int
    address: str  # of rank 0's node: a host name or an IP address
    port: int
    has_agent_store: bool = False  # an elastic agent (torchrun's or ours) hosts the store, not rank 0
    run_id: str = "run"  # separates this run's keys in the store from those of other runs at the same port
    has_own_devices: bool = False  # the launcher has chosen which devices each rank sees
    has_process_group: bool = False  # the launcher has connected the ranks, as Ray Train does
    launch_command: str = "torchrun --nproc-per-node {}"  # how to start ranks; their number replaces {}


def find_launch_info(variables: Mapping[str, str]) -> LaunchInfo | None:
    """Return what the launcher has set; None without a launcher, or for a single rank that torchrun did not start."""
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _check(_from_torchrun(variables), "torchrun")  # not has_own_devices: all ranks see the same ones
    if "TF_CONFIG" in variables:
        launch_info = _from_tf_config(variables["TF_CONFIG"])
    elif "OMPI_COMM_WORLD_RANK" in variables:
        launch_info = _from_mpirun(variables)
    elif "SLURM_STEP_NUM_TASKS" in variables:
        # Not SLURM_NTASKS: a batch script has that too, but it runs once and would wait for ranks that never start.
        launch_info = _from_srun(variables)
    else:
        return None
    if launch_info is None or launch_info.size == 1:
        return None
    launch_info = replace(launch_info, has_own_devices=any(name in variables for name in _VISIBLE_DEVICES_VARIABLES))
    return _check(launch_info, launch_info.launch_command.split()[0])  # the first word names the launcher


def _check(info: LaunchInfo, launcher: str) -> LaunchInfo:
    if 0 <= info.rank < info.size and 0 <= info.local_rank < info.local_size <= info.size:
        return info
    raise MeshError(
        f"{launcher} set rank {info.rank} of {info.size} and local rank {info.local_rank} of {info.local_size}, "
        "which is impossible; check the environment variables it sets"
    )


def _from_torchrun(variables: Mapping[str, str]) -> LaunchInfo:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in variables]
    if missing:
        present = next(name for name in names if name in variables)
        raise MeshError(
            f"the environment has {present} but no {missing[0]}; start the ranks with torchrun, which sets both"
        )
    rank, size, local_rank, local_size, port = (_number(variables, name) for name in (*names[:4], names[5]))
    if "RAY_JOB_ID" in variables and "TORCHELASTIC_RUN_ID" not in variables:
        return LaunchInfo(
            rank, size, local_rank, local_size, variables["MASTER_ADDR"], port, run_id=variables["RAY_JOB_ID"],
            has_process_group=True, launch_command="ScalingConfig(num_workers={})",
        )  # fmt: skip
    return LaunchInfo(
        rank, size, local_rank, local_size, variables["MASTER_ADDR"], port,
        has_agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=variables.get("TORCHELASTIC_RUN_ID", "run"),
    )  # fmt: skip


def _from_tf_config(text: str) -> LaunchInfo | None:
    """Read TensorFlow's description of a cluster. Rank 0 is the chief if there is one; then come the workers.

    `{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 1}}`
    """
    from stretto.mesh.tf_config import TfConfig

    try:
        config = TfConfig.model_validate_json(text)
    except ValueError:
        raise MeshError(
            f"TF_CONFIG={text!r} can't be read; "
            'use {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        ) from None
    if not any(config.cluster.values()):
        return None
    if config.task.type == "ps" or config.cluster.get("ps"):
        raise MeshError(
            "TF_CONFIG has parameter servers (ps), but stretto's workers all-reduce their gradients; "
            "remove ps from the cluster"
        )
    if config.task.type == "evaluator":
        raise MeshError(
            "TF_CONFIG makes this task an evaluator, but the workers evaluate by themselves; "
            "start only the chief and the workers, or evaluate with `stretto eval`"
        )
    # Older versions of TensorFlow call the chief a master.
    addresses = {
        (task_type, index): _host_and_port(address)
        for task_type in ("chief", "master", "worker")
        for index, address in enumerate(config.cluster.get(task_type, []))
    }
    task = (config.task.type, config.task.index)
    if task not in addresses:
        raise MeshError(
            f"TF_CONFIG makes this task {task[0]} {task[1]}, which its cluster does not have; fix task or cluster"
        )
    hosts, rank = [host for host, _ in addresses.values()], list(addresses).index(task)
    first_address, first_port = next(iter(addresses.values()))
    return LaunchInfo(
        rank, len(hosts), local_rank=hosts[:rank].count(hosts[rank]), local_size=hosts.count(hosts[rank]),
        address=first_address, port=first_port, run_id=fingerprint(list(addresses.values()))[:16],
        launch_command="TF_CONFIG with {} workers",
    )  # fmt: skip


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise MeshError(f"TF_CONFIG has {address!r}, which is not host:port; use a host name and a port number")
    return host.strip("[]"), int(port)  # an IPv6 address is in brackets


def _from_srun(variables: Mapping[str, str]) -> LaunchInfo:
    """Read the variables that srun sets for each task of a job step."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    rank, size, local_rank, node, job, step = (_number(variables, name) for name in names)
    tasks_per_node = expand_counts(_read(variables, "SLURM_STEP_TASKS_PER_NODE"))
    if node >= len(tasks_per_node):
        raise MeshError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE has no such node; check what srun sets")
    address = variables.get("MASTER_ADDR") or first_host(_read(variables, "SLURM_STEP_NODELIST"))
    # The same for all tasks of a job step, below the ephemeral ports. With 37 ports per job, steps rarely share one.
    port = _port(variables, 10_000 + (37 * job + step) % 20_000)
    return LaunchInfo(
        rank, size, local_rank, tasks_per_node[node], address, port,
        run_id=f"{job}.{step}", launch_command="srun -n {}",
    )  # fmt: skip


def _from_mpirun(variables: Mapping[str, str]) -> LaunchInfo:
    """Read the variables that Open MPI's mpirun sets. None of them has the address of rank 0's node."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local_rank, local_size = (_number(variables, f"OMPI_COMM_WORLD_{name}") for name in names)
    if size > local_size and "MASTER_ADDR" not in variables:
        raise MeshError(
            "mpirun started ranks on several hosts, but does not tell them the address of the first; "
            "add -x MASTER_ADDR=HOST with the first host's name"
        )
    return LaunchInfo(
        rank, size, local_rank, local_size, variables.get("MASTER_ADDR", "127.0.0.1"), _port(variables, _DEFAULT_PORT),
        run_id=variables.get("PMIX_NAMESPACE", "run"), launch_command="mpirun -n {}",
    )  # fmt: skip


def _port(variables: Mapping[str, str], default: int) -> int:
    """Return MASTER_PORT if the user has set it, else `default`."""
    return _number(variables, "MASTER_PORT") if "MASTER_PORT" in variables else default


def first_host(nodes: str) -> str:
    """Return a Slurm node list's first host: `n[01-03,7],login` means n01, n02, n03, n7, login and gives n01."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)  # up to the first comma outside brackets
    if first is None:
        raise MeshError(f"SLURM_STEP_NODELIST={nodes!r} can't be read; set MASTER_ADDR to the first host's name")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def expand_counts(counts: str) -> list[int]:
    """Return the number of tasks on each node from Slurm's notation: `2(x3),1` is 2, 2, 2, 1."""
    matches = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in counts.split(",")]
    if None in matches:
        raise MeshError(f"SLURM_STEP_TASKS_PER_NODE={counts!r} can't be read; start the ranks with torchrun")
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]


def _read(variables: Mapping[str, str], name: str) -> str:
    if name not in variables:
        raise MeshError(f"the environment has no {name}, but the launcher should set it; check the launcher")
    return variables[name]


def _number(variables: Mapping[str, str], name: str) -> int:
    value = _read(variables, name)
    try:
        return int(value)
    except ValueError:
        raise MeshError(f"{name}={value!r} is not a number; fix it, or start the ranks with torchrun") from None
