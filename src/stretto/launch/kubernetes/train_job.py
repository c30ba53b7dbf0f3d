"""make_train_job: a TrainJob of Kubeflow Trainer that runs a config, and the TrainingRuntime that it needs."""

from stretto.config.run import RunConfig
from stretto.launch.kubernetes.pod_job import JOB, Manifest, PodJob, check_pods, config_map, failure_policy, job_spec

_GROUP = "trainer.kubeflow.org"


def make_train_job(config: RunConfig, job: PodJob) -> list[Manifest]:
    """Return the manifests of a TrainJob that runs a config: pass them to `dump_yaml`, then to `kubectl apply`.

    Its TrainingRuntime has the exit codes, restarts and grace period of `make_job_set`. Kubeflow Trainer tells the pods
    where the first one is.
    """
    check_pods(config, job)
    runtime = {
        "apiVersion": f"{_GROUP}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": {f"{_GROUP}/framework": "torch"}},
        "spec": {
            # `torch`, so that pods get the variables that torchrun, and `stretto train`, read.
            "mlPolicy": {"numNodes": job.num_nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": failure_policy(job),
                    "replicatedJobs": [
                        {
                            "name": JOB,
                            "replicas": 1,
                            "template": {
                                "metadata": {"labels": {f"{_GROUP}/trainjob-ancestor-step": "trainer"}},
                                "spec": job_spec(config, job, []),
                            },
                        }
                    ],
                }
            },
        },
    }
    trainer: Manifest = {
        "image": job.image,
        "command": job.command,
        "numNodes": job.num_nodes,
        "numProcPerNode": job.num_local_ranks,
    }
    if job.resources:
        trainer["resourcesPerNode"] = job.resources
    train_job = {
        "apiVersion": f"{_GROUP}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"apiGroup": _GROUP, "kind": "TrainingRuntime", "name": job.name},
            "trainer": trainer,
        },
    }
    return [config_map(config, job), runtime, train_job]
