"""NodeSinks: the sinks of ranks other than rank 0, for the figures of their node's ranks."""

from dataclasses import asdict
from pathlib import Path
from typing import Self

from stretto.config.logging import LoggingConfig
from stretto.train.node_report import NodeReport
from stretto.train.sinks.background import BackgroundSink
from stretto.train.sinks.otel import OtelSink
from stretto.train.sinks.sink import NODE
from stretto.train.sinks.sinks import check_node_sinks, run_status


class NodeSinks:
    """Sinks for the reports on a node. Rank 0 writes those on its own node to its `Sinks`.

    Only the first rank of a node gets reports, so the sinks are opened with the first one: other ranks have none.
    """

    def __init__(self, config: LoggingConfig, folder: Path | str) -> None:
        check_node_sinks(config)
        self._endpoint, self._folder = config.otlp_endpoint, Path(folder)
        self._sink: BackgroundSink | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._sink is not None:
            self._sink.close(run_status(error))

    def write_node(self, report: NodeReport) -> None:
        """Queue a report, without waiting."""
        if self._endpoint is None:
            return
        if self._sink is None:
            self._sink = BackgroundSink("otlp_endpoint", OtelSink(self._endpoint, self._folder))
        self._sink.write(NODE, asdict(report))
