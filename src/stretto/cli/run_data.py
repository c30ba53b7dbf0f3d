"""find_data: the data that a command uses unless --data is given."""

from collections.abc import Sequence

from stretto.base.locations import check_url
from stretto.config.run import RunConfig


def find_data(run: str, config: RunConfig, fields: Sequence[str], allowed_locations: Sequence[str]) -> str | None:
    """Return the first of some data fields that a run's config has set, or None; a URL must be allowed."""
    for name in fields:
        location: str | None = getattr(config.data, name)
        if location is not None:
            return check_url(location, f"{run}: data.{name}", allowed_locations)
    return None
