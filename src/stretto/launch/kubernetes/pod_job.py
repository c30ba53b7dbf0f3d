"""PodJob: how a run is spread over pods, and the parts that all kinds of manifests have in common."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from stretto.base.errors import ConfigError, FencedError, StrettoError
from stretto.base.remote import is_remote
from stretto.base.units import pluralize
from stretto.config.run import RunConfig
from stretto.config.toml import dump_config
from stretto.mesh.secret import SECRET_VARIABLE

Manifest = dict[str, Any]
"""An object of Kubernetes, as its API takes it."""

CONTAINER = JOB = "node"
"""The names that Kubeflow Trainer expects: of the container that trains, and of its job."""
_CONFIG_FOLDER = "/etc/stretto"
# Pods live longer than `run.grace_seconds`, so that the launcher can kill ranks that hang, and report it.
_EXIT_SECONDS = 10
# After these, another start would fail in the same way, or disturb a newer launch. After others, the run resumes.
_PERMANENT_EXIT_CODES = (StrettoError.exit_code, FencedError.exit_code)
# The names of pods are longer, and at most 63 characters.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True)
class PodJob:
    """One pod per node, each with one rank per GPU; without GPUs, ranks compute on the CPU."""

    name: str  # of the job, and of what belongs to it
    image: str  # a container image that has the command `stretto`
    num_nodes: int
    gpus_per_node: int = 8
    ranks_per_node: int | None = None  # None: `gpus_per_node`, or 1 without GPUs
    volume: str | None = None  # CLAIM:/PATH, a claim of a volume that all pods share, and where it is mounted
    secret: str | None = None  # name of the Secret whose key `secret` the ranks sign their messages with
    max_restarts: int = 20
    gpu_resource: str = "nvidia.com/gpu"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"name={self.name!r} can't name a job; use up to 40 small letters, digits and dashes, and begin with a "
                "letter"
            )
        if self.num_nodes < 1 or self.gpus_per_node < 0 or self.num_local_ranks < 1 or self.max_restarts < 0:
            raise ConfigError(
                f"num_nodes={self.num_nodes}, gpus_per_node={self.gpus_per_node}, ranks_per_node={self.ranks_per_node} "
                f"and max_restarts={self.max_restarts} can't be used together; use at least one node and one rank"
            )
        if self.volume is not None and not re.fullmatch(r"[a-z0-9][-a-z0-9.]*:/[^:]+", self.volume):
            raise ConfigError(f"volume={self.volume!r} is not a claim and a path; use CLAIM:/PATH, like runs:/runs")

    @property
    def num_local_ranks(self) -> int:
        """Number of ranks in each pod."""
        return max(self.gpus_per_node, 1) if self.ranks_per_node is None else self.ranks_per_node

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all pods together."""
        return self.num_nodes * self.num_local_ranks

    @property
    def command(self) -> list[str]:
        """What each pod runs."""
        return ["stretto", "train", f"{_CONFIG_FOLDER}/run.toml"]

    @property
    def resources(self) -> Manifest:
        """What each pod gets."""
        return {"limits": {self.gpu_resource: self.gpus_per_node}} if self.gpus_per_node else {}


def config_map(config: RunConfig, job: PodJob) -> Manifest:
    """Return the object that brings the config into the pods."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _config_name(job)},
        "data": {"run.toml": dump_config(config)},
    }


def failure_policy(job: PodJob) -> Manifest:
    """Return the part of a JobSet that starts all pods again after a failure, except after a user's mistake."""
    return {
        "maxRestarts": job.max_restarts,
        "rules": [{"name": "permanent", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }


def job_spec(config: RunConfig, job: PodJob, variables: list[Manifest]) -> Manifest:
    """Return the spec of the job with all pods. It never restarts one pod: all ranks must begin together."""
    permanent = {"containerName": CONTAINER, "operator": "In", "values": list(_PERMANENT_EXIT_CODES)}
    return {
        "completionMode": "Indexed",
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": permanent}]},
        "template": {"spec": _pod_spec(config, job, variables)},
    }


def check_pods(config: RunConfig, job: PodJob) -> None:
    """Raise if pods could not run this config, or would lose what it saves."""
    layout = config.layout
    if layout.num_ranks != job.num_ranks and not layout.auto and not layout.elastic:
        raise ConfigError(
            f"the layout needs {pluralize(layout.num_ranks, 'rank')}, but {pluralize(job.num_nodes, 'node')} with "
            f"{job.num_local_ranks} each have {job.num_ranks}; change the layout or the number of nodes, or set "
            "layout.elastic"
        )
    if job.num_nodes > 1 and config.save.to is not None and job.secret is None:
        raise ConfigError(
            f"save.to={config.save.to} leaves the pods without a folder for the secret with which ranks sign their "
            "messages; pass --secret"
        )
    mount = None if job.volume is None else PurePosixPath(job.volume.partition(":")[2])
    folder = PurePosixPath(config.run.folder)
    if (mount is None or mount not in folder.parents) and not (config.save.to and is_remote(config.save.to)):
        remedy = "pass volume=CLAIM:/PATH" if mount is None else f"use a folder in {mount}"
        raise ConfigError(f"run.folder={folder} would be lost with its pod; {remedy}, or set save.to to a URL")
    for name in ("train", "valid"):
        location = getattr(config.data, name)
        if location is not None and not is_remote(location) and not location.startswith("/"):
            raise ConfigError(
                f"data.{name}={location} is relative to a folder of this machine; use a URL, or a path in the pods"
            )


def _config_name(job: PodJob) -> str:
    return f"{job.name}-config"


def _pod_spec(config: RunConfig, job: PodJob, variables: list[Manifest]) -> Manifest:
    mounts = [
        {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        # Otherwise 64 MB, which is too little for NCCL within a node.
        {"name": "memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": _config_name(job)}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    if job.volume is not None:
        claim, _, path = job.volume.partition(":")
        mounts.append({"name": "runs", "mountPath": path})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
    if job.secret is not None:
        reference = {"secretKeyRef": {"name": job.secret, "key": "secret"}}
        variables = [*variables, {"name": SECRET_VARIABLE, "valueFrom": reference}]
    container: Manifest = {"name": CONTAINER, "image": job.image, "command": job.command, "env": variables}
    if job.resources:
        container["resources"] = job.resources
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": config.run.grace_seconds + _EXIT_SECONDS,
        "automountServiceAccountToken": False,
        "containers": [{**container, "volumeMounts": mounts}],
        "volumes": volumes,
    }
