"""find_data: the data that a command uses unless --data is given."""

from collections.abc import Sequence

from stretto.base.errors import ConfigError
from stretto.base.locations import check_url
from stretto.config.run import RunConfig


def find_data(run: str, config: RunConfig, fields: Sequence[str], allowed_locations: Sequence[str]) -> str | None:
    """Return the first of some data fields that a run's config has set, or None; a URL must be allowed."""
    for name in fields:
        location: str | None = getattr(config.data, name)
        if location is not None:
            return check_url(location, f"{run}: data.{name}", allowed_locations)
    return None


def no_data_error(run: str, config: RunConfig) -> ConfigError:
    """Return the error of a command that needs --data, because the run has no data.valid."""
    if config.data.factory is None:
        return ConfigError(f"{run} was trained without data.valid; choose the data with --data=DATA")
    return ConfigError(
        f"the data of {run} comes from a function (data.factory={config.data.factory!r}), which only `stretto eval "
        f"--trust` calls; to predict, call stretto.serve.predict_arrays(stretto.load_model({run!r}), rows) in Python"
    )
