"""NodeSinks: the sinks of ranks other than rank 0, for the figures of their node's ranks."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Self

from stretto.config.logging import LoggingConfig
from stretto.train.node_report import NodeReport
from stretto.train.sinks.background import BackgroundSink, describe_error
from stretto.train.sinks.otel import OtelSink
from stretto.train.sinks.sink import NODE
from stretto.train.sinks.sinks import check_node_sinks, run_status

_CLOSE_SECONDS, _CLOSE_SECONDS_AFTER_ERROR = 30.0, 2.0

_log = logging.getLogger(__name__)


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
            # Other ranks learn of an error only after this.
            self._sink.close(run_status(error), _CLOSE_SECONDS if error is None else _CLOSE_SECONDS_AFTER_ERROR)

    def write_node(self, report: NodeReport) -> None:
        """Queue a report, without waiting."""
        if self._endpoint is None:
            return
        if self._sink is None:
            try:
                sink = OtelSink(self._endpoint, self._folder)
            except Exception as error:  # noqa: BLE001 - a package that can't be imported must not end the run
                _log.warning("logging.otlp_endpoint lacks this node (%s); the run is unaffected", describe_error(error))
                self._endpoint = None
                return
            self._sink = BackgroundSink("otlp_endpoint", sink)
        self._sink.write(NODE, asdict(report))
