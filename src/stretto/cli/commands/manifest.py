"""The command `stretto manifest`.

Print a Kubernetes manifest that runs a TOML file on several nodes: a JobSet, or a TrainJob of Kubeflow Trainer with its
TrainingRuntime. Each has one pod per node, restarts that resume the run, and time to save before a pod ends.

example:
  stretto manifest jobset run.toml --image IMAGE --nodes 2 --gpus-per-node 8 --volume runs:/runs > first.yaml
  stretto manifest trainjob run.toml --image IMAGE --nodes 2 --gpus-per-node 8 --volume runs:/runs
"""

import argparse

from stretto.cli.config_options import add_config_options, load_run_config
from stretto.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.usage = (
        "stretto manifest jobset|trainjob RUN.toml --image IMAGE [--nodes N] [--gpus-per-node N] [--ranks-per-node N] "
        "[--volume CLAIM:/PATH] [--secret NAME] [--name NAME] [--max-restarts N] [--section.field VALUE ...]"
    )
    add = parser.add_argument
    add("kind", choices=("jobset", "trainjob"), help="what to print")
    add("--image", required=True, metavar="IMAGE", help="container image that has the command `stretto`")
    add("--nodes", dest="num_nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of each node; 0: use the CPU (default: 8)")
    add("--ranks-per-node", type=int, metavar="N", help="ranks of each node (default: one per GPU, or 1)")
    add("--gpu-resource", default="nvidia.com/gpu", metavar="NAME", help="name of the GPUs (default: %(default)s)")
    add("--volume", metavar="CLAIM:/PATH", help="claim of a volume that all pods share, and where it is mounted")
    add("--secret", metavar="NAME", help="Secret whose key `secret` the ranks sign their messages with")
    add("--name", default="stretto", metavar="NAME", help="name of the job (default: %(default)s)")
    add("--max-restarts", type=int, default=20, metavar="N", help="restarts after failures (default: %(default)s)")
    add_config_options(parser)


def run(options: argparse.Namespace) -> None:
    """Print the manifest."""
    config = load_run_config(options)
    from stretto.launch.kubernetes.job_set import make_job_set
    from stretto.launch.kubernetes.pod_job import PodJob
    from stretto.launch.kubernetes.train_job import make_train_job
    from stretto.launch.kubernetes.yaml_text import dump_yaml

    job = PodJob(
        options.name,
        options.image,
        options.num_nodes,
        options.gpus_per_node,
        options.ranks_per_node,
        options.volume,
        options.secret,
        options.max_restarts,
        options.gpu_resource,
    )
    make = make_job_set if options.kind == "jobset" else make_train_job
    print(dump_yaml(make(config, job)), end="")
