"""make_job_set: a JobSet that runs a config, one pod per node."""

from stretto.config.run import RunConfig
from stretto.launch.kubernetes.pod_job import JOB, Manifest, PodJob, check_pods, config_map, failure_policy, job_spec

_PORT = 29500
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def make_job_set(config: RunConfig, job: PodJob) -> list[Manifest]:
    """Return the manifests of a JobSet that runs a config: pass them to `dump_yaml`, then to `kubectl apply`.

    If a pod ends with exit code 2 or 76, the JobSet has failed. After any other failure, such as 75 (a rank was lost,
    or the run was preempted), all pods are started again, and the run resumes, up to `max_restarts` times.
    """
    check_pods(config, job)
    # Pods find the first one through the service that JobSet creates, under the name of the JobSet.
    variables: list[Manifest] = [
        {"name": "PET_NNODES", "value": str(job.num_nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(job.num_local_ranks)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "PET_MASTER_ADDR", "value": f"{job.name}-{JOB}-0-0.{job.name}"},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": failure_policy(job),
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job_spec(config, job, variables)}}],
        },
    }
    return [config_map(config, job), job_set]
