"""Place: where this process stands among those that a launcher has started, read from the environment it has left.

Understood are torchrun, TF_CONFIG, Open MPI's mpirun and Slurm's srun, in this order: whoever is nearer to the process
has the word. mpirun may run within srun, and torchrun within any of them.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stretto.base.errors import MeshError

# Where torch's own launchers meet if nothing else is said.
_DEFAULT_PORT = 29500
# By these a launcher lets a process see some devices only.
_VISIBLE_DEVICES_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(frozen=True)
class LaunchInfo:
    """One rank's place, and where all of them meet."""

    rank: int
    size: int
    local_rank: int  # among those of this machine
    local_size: int
    address: str  # of the host of rank 0
    port: int
    has_agent_store: bool = False  # torchrun keeps the store, not rank 0
    run_id: str = (
        "run_id"  # what tells this run_id's keys in the store from those of others, who may meet at the same port
    )
    is_bound: bool = False  # the launcher has said which devices each process may see
    launch_command: str = "torchrun --nproc-per-node {}"  # the way to start another number of ranks

    @property
    def is_single_node(self) -> bool:
        return self.size == self.local_size


def find_launch_info(variables: Mapping[str, str]) -> LaunchInfo | None:
    """Return the place that a launcher has given this process; none if nobody has, or to one process alone."""
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _check(_torchrun(variables), "torchrun")
    if "TF_CONFIG" in variables:
        launch_info = _tf_config(variables["TF_CONFIG"])
    elif "OMPI_COMM_WORLD_RANK" in variables:
        launch_info = _mpirun(variables)
    elif "SLURM_STEP_NUM_TASKS" in variables:
        # Not SLURM_NTASKS, which the script of a batch job has too: it runs once, and would wait for the others.
        launch_info = _srun(variables)
    else:
        return None
    if launch_info is None or launch_info.size == 1:
        return None
    launch_info = replace(launch_info, is_bound=any(name in variables for name in _VISIBLE_DEVICES_VARIABLES))
    return _check(launch_info, launch_info.launch_command.split()[0])


def _check(launch_info: LaunchInfo, launcher: str) -> LaunchInfo:
    if (
        0 <= launch_info.rank < launch_info.size
        and 0 <= launch_info.local_rank < launch_info.local_size <= launch_info.size
    ):
        return launch_info
    raise MeshError(
        f"{launcher} says that this is rank {launch_info.rank} of {launch_info.size}, {launch_info.local_rank} of {launch_info.local_size} on "
        "this machine, which can't be; look at the environment it sets"
    )


def _torchrun(variables: Mapping[str, str]) -> LaunchInfo:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    there = [name for name in names if name in variables]
    absent = [name for name in names if name not in there]
    if absent:
        raise MeshError(
            f"the environment has {there[0]} but no {absent[0]}; start the ranks with torchrun, which sets all"
        )
    rank, size, local_rank, local_size, port = _numbers(variables, *names[:4], names[5])
    return LaunchInfo(
        rank, size, local_rank, local_size, variables["MASTER_ADDR"], port,
        has_agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=variables.get("TORCHELASTIC_RUN_ID", "run_id"),
    )  # fmt: skip


def _tf_config(text: str) -> LaunchInfo | None:
    """Read TensorFlow's description of a cluster: ranks are the chief, then the workers; they meet at the first's port.

    `{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 1}}`
    """
    try:
        found = json.loads(text)
        cluster, task = found.get("cluster", {}), found.get("task", {})
        tasks = {str(kind): [str(address) for address in there] for kind, there in cluster.items()}
        kind, index = str(task.get("type", "worker")), int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError):
        raise MeshError(
            f"TF_CONFIG={text!r} is not understood; "
            'it should be {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        ) from None
    if not any(tasks.values()):
        return None
    if kind == "ps" or tasks.get("ps"):
        raise MeshError(
            "TF_CONFIG has parameter servers (ps), but here the workers themselves add their gradients up; "
            "leave ps out of the cluster"
        )
    if kind == "evaluator":
        raise MeshError(
            "TF_CONFIG says that this is an evaluator, but a run evaluates itself, or `stretto eval` does it; "
            "start the chief and the workers only"
        )
    # Older TensorFlow has called the chief a master.
    kinds = ("chief", "master", "worker")
    ranks = [(kind, index, address) for kind in kinds for index, address in enumerate(tasks.get(kind, []))]
    rank = next((rank for rank, launch_info in enumerate(ranks) if launch_info[:2] == (kind, index)), None)
    if rank is None:
        raise MeshError(
            f"TF_CONFIG says that this is {kind} {index}, but its cluster has no such task; correct task or cluster"
        )
    hosts = [_host_and_port(address)[0] for _, _, address in ranks]
    address, port = _host_and_port(ranks[0][2])
    own = hosts[rank]
    digest = hashlib.sha256(json.dumps(ranks).encode()).hexdigest()
    return LaunchInfo(
        rank, len(ranks), hosts[:rank].count(own), hosts.count(own), address, port, run_id=digest[:16],
        launch_command="TF_CONFIG with {} workers",
    )  # fmt: skip


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise MeshError(f"TF_CONFIG has a worker at {address!r}, without a port; write it as host:port")
    return host.strip("[]"), int(port)


def _srun(variables: Mapping[str, str]) -> LaunchInfo:
    """Read what srun sets for each task of a step."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    rank, size, local_rank, node, job, step = _numbers(variables, *names)
    per_node = expand_counts(_read(variables, "SLURM_STEP_TASKS_PER_NODE"))
    if node >= len(per_node):
        raise MeshError(f"SLURM_NODEID={node} is beyond SLURM_STEP_TASKS_PER_NODE; look at the environment srun sets")
    # A port that every task knows without asking, another for each step, below those that systems give out.
    port = 10_000 + (37 * job + step) % 20_000
    launch_info = LaunchInfo(
        rank, size, local_rank, per_node[node], first_host(_read(variables, "SLURM_STEP_NODELIST")), port,
        run_id=f"{job}.{step}", launch_command="srun -n {}",
    )  # fmt: skip
    return _with_master_address(launch_info, variables)


def _mpirun(variables: Mapping[str, str]) -> LaunchInfo:
    """Read what Open MPI's mpirun sets for each process; it doesn't tell where the first one is."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local_rank, local_size = _numbers(variables, *(f"OMPI_COMM_WORLD_{name}" for name in names))
    if size > local_size and "MASTER_ADDR" not in variables:
        raise MeshError(
            "mpirun started ranks on several hosts, but does not tell them where the first one is; "
            "add -x MASTER_ADDR=HOST with the first host's name"
        )
    launch_info = LaunchInfo(
        rank, size, local_rank, local_size, "127.0.0.1", _DEFAULT_PORT,
        run_id=variables.get("PMIX_NAMESPACE", "run_id"), launch_command="mpirun -n {}",
    )  # fmt: skip
    return _with_master_address(launch_info, variables)


def _with_master_address(launch_info: LaunchInfo, variables: Mapping[str, str]) -> LaunchInfo:
    """Meet where the user says, if that was said."""
    (port,) = _numbers(variables, "MASTER_PORT") if "MASTER_PORT" in variables else (launch_info.port,)
    return replace(launch_info, address=variables.get("MASTER_ADDR", launch_info.address), port=port)


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: `n[01-03,7],login` is n01, n02, n03, n7, login."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if found is None:
        raise MeshError(f"SLURM_STEP_NODELIST={nodes!r} is not understood; set MASTER_ADDR to the first host's name")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0])


def expand_counts(counts: str) -> list[int]:
    """Return the tasks of each node, from what Slurm writes: `2(x3),1` is 2, 2, 2, 1."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in counts.split(",")]
    if any(part is None for part in found):
        raise MeshError(f"SLURM_STEP_TASKS_PER_NODE={counts!r} is not understood; start the ranks with torchrun")
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]


def _read(variables: Mapping[str, str], name: str) -> str:
    if name not in variables:
        raise MeshError(f"the environment has no {name}, though other variables of its kind; look at the launcher")
    return variables[name]


def _numbers(variables: Mapping[str, str], *names: str) -> list[int]:
    try:
        return [int(_read(variables, name)) for name in names]
    except ValueError as error:
        raise MeshError(
            f"the environment's rank or size is not a number ({error}); start the ranks with torchrun"
        ) from None
