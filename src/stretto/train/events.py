"""The events of a run, and the log line of each."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from stretto.base.errors import StrettoError
from stretto.base.metric_names import PER_CLASS
from stretto.checkpoint.background_save import SaveReport
from stretto.train.evaluate import Evaluation
from stretto.train.plan_check import PlanReport
from stretto.train.rank_monitor import RankReport
from stretto.train.straggler import StragglerReport
from stretto.train.trainer import StepReport
from stretto.train.weight_check import WeightReport


class PreemptedError(StrettoError):
    """The run was asked to stop; it has saved its last step and resumes from there when it is started again."""

    exit_code = os.EX_TEMPFAIL
    ends_all_ranks = True


@dataclass(frozen=True)
class EvaluationReport:
    """The scores on the validation data after a step."""

    step: int
    evaluation: Evaluation


Event = StepReport | RankReport | StragglerReport | EvaluationReport | SaveReport | PlanReport | WeightReport

_KINDS = {
    StepReport: "step",
    StragglerReport: "straggler",
    SaveReport: "save",
    PlanReport: "plan",
    WeightReport: "weights",
}


def log_line(event: Event) -> tuple[str, Mapping[str, object]]:
    """Return the `kind` of an event's log line, and the line's other fields."""
    if isinstance(event, EvaluationReport):
        evaluation = event.evaluation
        scores = {"loss": evaluation.loss, "num_targets": evaluation.num_targets, **evaluation.scores}
        table = {} if evaluation.class_table is None else {PER_CLASS: evaluation.class_table.as_dict()}
        return "evaluation", {"step": event.step, **scores, **table}
    if isinstance(event, RankReport):
        return "ranks", event.log_fields()
    return _KINDS[type(event)], asdict(event)
