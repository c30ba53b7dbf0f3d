from stretto.launch.doctor import diagnose as diagnose
from stretto.launch.finding import Finding as Finding

__all__: list[str]
