"""find_naive_scores: what a naive forecast scores on the data that a model is evaluated on."""

from pathlib import Path

from stretto.serve.source import is_raw, open_source
from stretto.store.sequences import Sequences
from stretto.train.feed import make_forecast_transform
from stretto.train.naive_scores import NaiveScores
from stretto.train.trained_model import TrainedModel
from stretto.windows.items import SlidingWindows


def find_naive_scores(trained: TrainedModel, location: Path | str, stride: int | None = None) -> NaiveScores | None:
    """Return the scores of a naive forecast on windows that are `stride` apart (default: the horizon, as in `predict`).

    None unless the run forecasts from sliding windows (`data.context`) and the data is prepared.
    """
    data = trained.config.data
    if trained.data_spec.task.targets != "horizon" or data.context is None or data.factory or is_raw(location):
        return None
    source = open_source(location, trained.data_spec)
    assert isinstance(source, Sequences)
    windows = SlidingWindows(source, make_forecast_transform(source, data), data.context, stride or data.horizon)
    return NaiveScores.of(windows, trained.config.model)
