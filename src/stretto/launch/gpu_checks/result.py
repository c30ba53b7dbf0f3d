"""CheckResult: what one check of GPUs has found. GpuReport: the results of all checks."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Backend = Literal["nccl", "strict", "gloo"]
"""nccl: ranks on GPUs. strict: ranks on CPUs, under NCCL's rules. gloo: ranks on CPUs."""
RESULT_FILE = "result.json"
"""Where rank 0 of a check writes its result, in the folder of the check."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a check. Its ranks return it without `name`, `seconds` and `ranks`."""

    result: Literal["passed", "failed", "skipped"]
    message: str  # one sentence
    figure: str = ""  # the most important figure, for a table
    figures: dict[str, Any] = field(default_factory=dict)  # all figures, with units in their names
    name: str = ""
    seconds: float = 0.0
    ranks: list[dict[str, Any]] = field(default_factory=list)  # after a failure: what each rank did last and printed


@dataclass(frozen=True)
class GpuReport:
    """The results of all checks, with the versions that they ran with."""

    backend: Backend
    num_ranks: int  # how many ranks the largest checks could use
    versions: dict[str, Any]
    checks: list[CheckResult]
    machine: dict[str, str] = field(default_factory=dict)  # date, os, cpu, command

    @property
    def has_failures(self) -> bool:
        """Whether a check has failed."""
        return any(check.result == "failed" for check in self.checks)

    def to_json(self) -> str:
        """Return the report as JSON, to paste into an issue."""
        return json.dumps(asdict(self), indent=1)
