"""Settings that have no effect are reported for the layout that is used."""

import pytest

from stretto import RunConfig
from stretto.config.idle_settings import idle_settings
from stretto.config.toml import parse_config


def make_config(layout: dict[str, object], **sections: dict[str, object]) -> RunConfig:
    return parse_config({"data": {"train": "corpus"}, "layout": layout, **sections})


@pytest.mark.parametrize(
    ("layout", "sections", "start"),
    [
        ({"stages": 2}, {"sentinel": {"hash_every": 9}}, "sentinel.hash_every=9 has no effect: "),
        ({"spans": 2}, {"sentinel": {"hash_every": 9}}, None),
        ({"replicas": 2}, {"sentinel": {"hash_every": 9}}, None),
        ({"interleave": 3}, {}, "layout.interleave=3 has no effect on one stage; "),
        ({"interleave": 3, "stages": 2}, {}, None),
        ({"vocab_parallel": True}, {}, "layout.vocab_parallel=true has no effect on one stage; "),
        ({"vocab_parallel": True, "replicas": 2}, {}, "layout.vocab_parallel=true has no effect on one stage; "),
        ({"vocab_parallel": True, "stages": 2}, {}, None),
    ],
)
def test_a_setting_without_effect_in_the_layout_is_named(
    layout: dict[str, object], sections: dict[str, dict[str, object]], start: str | None
) -> None:
    sentences = idle_settings(make_config(layout, **sections))
    assert [sentence[: len(start or "")] for sentence in sentences] == ([] if start is None else [start])
