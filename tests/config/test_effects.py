import re
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

from stretto.config.effects import EFFECTS, used_effects
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config, section_model

SECURITY = Path(__file__).parents[2] / "SECURITY.md"
# Fields that hold text, or are in [logging], but make stretto neither run code nor use anything but local files that it
# reads as data, and the run's folder.
HARMLESS = {
    "data.targets",
    "data.known_future",
    "data.static",
    "model.weights",  # safetensors in a local file
    "train.optimizer",  # a class of torch.optim
    "train.options",
    "train.groups",
    "run.folder",
    "run.device",
    "metrics.monitor",
    "logging.tensorboard",
}


def holds_text(annotation: object) -> bool:
    """Whether a field of this type can hold more than numbers, true, false and a choice of given words."""
    if get_origin(annotation) is Literal or annotation in (int, float, bool, NoneType, Ellipsis):
        return False
    arguments = get_args(annotation)
    return any(map(holds_text, arguments)) if arguments and get_origin(annotation) is not dict else True


def test_every_field_that_could_name_code_or_a_location_is_classified() -> None:
    fields = {
        f"{section}.{name}"
        for section in RunConfig.model_fields
        for name, field in section_model(section).model_fields.items()
        if holds_text(field.annotation) or section == "logging"
    }
    assert not EFFECTS.keys() & HARMLESS
    assert fields == EFFECTS.keys() | HARMLESS


def test_the_security_page_has_a_row_for_each_of_these_fields() -> None:
    _, _, rest = SECURITY.read_text().partition("## What a config can execute or contact\n")
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+) \|$", rest.partition("\n## ")[0], re.MULTILINE)
    assert rows == list(EFFECTS.items())


def test_a_field_has_an_effect_only_if_it_is_used() -> None:
    harmless = {
        "data": {"train": "data/train", "valid": "/data/valid"},
        "model": {"loss": "ctc", "weights": "other.safetensors"},
        "metrics": {"names": ["accuracy"]},
        "logging": {"tensorboard": True},
    }
    assert list(used_effects(parse_config(harmless))) == []
    used = {
        "data": {"train": "s3://me:secret@bucket/train?key=secret", "valid": "https://host/valid", "cache": "/cache"},
        "model": {"factory": "net.py:make", "loss": "losses:mine"},
        "save": {"to": "../elsewhere"},
        "metrics": {"names": ["accuracy", "a.py:one", "b.c:two"]},
        "logging": {
            "wandb_project": "p",
            "mlflow_experiment": "e",
            "prometheus_port": 9000,
            "otlp_endpoint": "http://host:4318",
        },
    }
    lines = list(used_effects(parse_config(used)))
    assert lines[0] == "model.factory = 'net.py:make' imports and runs Python code"
    assert lines[2:4] == [f"metrics.names = '{name}' imports and runs Python code" for name in ("a.py:one", "b.c:two")]
    assert {line.partition(" = ")[0] for line in lines} == EFFECTS.keys() - {"data.factory"}
    assert "'s3://bucket/train' reads" in "\n".join(lines)
    assert "secret" not in "".join(lines) and "".join(lines).isprintable()
    (line,) = used_effects(parse_config({"data": {"factory": "rows.py:make"}}))
    assert line == "data.factory = 'rows.py:make' imports and runs Python code"
