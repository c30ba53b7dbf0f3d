from stretto.config.logging import LoggingConfig as LoggingConfig
from stretto.engine.gather import gather_model as gather_model
from stretto.train.events import EvaluationReport as EvaluationReport
from stretto.train.live_trainer import LiveTrainer as LiveTrainer
from stretto.train.metrics.class_table import ClassScores as ClassScores
from stretto.train.metrics.class_table import ClassTable as ClassTable
from stretto.train.metrics.entities import EntityCounts as EntityCounts
from stretto.train.metrics.entities import find_entities as find_entities
from stretto.train.metrics.error_rate import ErrorRate as ErrorRate
from stretto.train.metrics.error_rate import edit_distance as edit_distance
from stretto.train.metrics.metric_totals import Metrics as Metrics
from stretto.train.metrics.sum_metric import MetricFunction as MetricFunction
from stretto.train.node_report import NodeReport as NodeReport
from stretto.train.notice import NoticeWatch as NoticeWatch
from stretto.train.plan_check import PlanReport as PlanReport
from stretto.train.rank_monitor import RankMonitor as RankMonitor
from stretto.train.rank_monitor import RankReport as RankReport
from stretto.train.sinks.node_sinks import NodeSinks as NodeSinks
from stretto.train.sinks.sinks import Sinks as Sinks
from stretto.train.sinks.sinks import open_sinks as open_sinks
from stretto.train.trace import gather_trace as gather_trace
from stretto.train.trainer import Request as Request

__all__: list[str]
