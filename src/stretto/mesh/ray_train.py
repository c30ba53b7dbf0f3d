"""Takes over from Ray Train, which has already connected its workers with a process group of its own."""

import socket
from dataclasses import replace

import torch
import torch.distributed as dist

from stretto.mesh.launch_info import LaunchInfo


def replace_process_group(launch_info: LaunchInfo, device: torch.device) -> LaunchInfo:
    """End Ray Train's process group on all workers; return where they meet instead: at another port of rank 0's node.

    torch has one default process group per process. Ours has a store that only ranks of this run can write to, and a
    timeout that names the lost rank. Ray's own store, at MASTER_PORT, may end at any time after its group has ended.
    """
    if not dist.is_initialized():
        return launch_info  # an earlier `world` of this worker has replaced it, and Ray's store is gone
    port = torch.zeros(1, dtype=torch.int64, device=device if dist.get_backend() == dist.Backend.NCCL else "cpu")
    if launch_info.rank == 0:
        with socket.create_server(("", 0)) as listener:
            port += listener.getsockname()[1]
    dist.all_reduce(port)
    free_port = int(port.item())
    dist.destroy_process_group()
    return replace(launch_info, port=free_port)
