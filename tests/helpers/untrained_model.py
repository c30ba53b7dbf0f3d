"""A model with its initial weights, for tests of what is done with a trained one."""

from collections.abc import Mapping
from pathlib import Path

from stretto import TrainedModel
from stretto.config.toml import parse_config
from stretto.nn import initialize
from stretto.train.build import build_model
from stretto.train.feed import open_feed


def untrained(
    location: Path | str, model: Mapping[str, object] = {}, metrics: Mapping[str, object] = {}, **data: object
) -> TrainedModel:
    """Return a model for some data as a run would have it, with initial weights; `data` are fields of [data]."""
    config = parse_config(
        {
            "data": {"train": str(location), **data},
            "model": {"layers": 1, "hidden": 8, **model},
            "run": {"device": "cpu"},
            "metrics": dict(metrics),
        }
    )
    data_spec = open_feed("data.train", location, config.data, config.layout, config.run.seed).data_spec
    return TrainedModel(config, data_spec, initialize(build_model(config.model, data_spec.task), seed=5))
