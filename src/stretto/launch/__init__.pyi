from stretto.launch.doctor import diagnose as diagnose
from stretto.launch.finding import Finding as Finding
from stretto.launch.gpu_checks.result import CheckResult as CheckResult
from stretto.launch.gpu_checks.result import GpuReport as GpuReport
from stretto.launch.gpu_checks.run_checks import diagnose_gpus as diagnose_gpus
from stretto.launch.kubernetes.job_set import make_job_set as make_job_set
from stretto.launch.kubernetes.pod_job import PodJob as PodJob
from stretto.launch.kubernetes.train_job import make_train_job as make_train_job
from stretto.launch.kubernetes.yaml_text import dump_yaml as dump_yaml

__all__: list[str]
