from stretto.launch.doctor import diagnose as diagnose
from stretto.launch.finding import Finding as Finding
from stretto.launch.gpu_checks.result import CheckResult as CheckResult
from stretto.launch.gpu_checks.result import GpuReport as GpuReport
from stretto.launch.gpu_checks.run_checks import diagnose_gpus as diagnose_gpus

__all__: list[str]
