"""A run with `model.loss = "adaptive_softmax"`: trained, evaluated, loaded, and asked for text."""

from pathlib import Path

import pytest
import torch

from stretto import Run, World, load_model
from stretto.config.toml import parse_config
from stretto.data import Corpus
from stretto.errors import ConfigError
from stretto.serve import generate


def test_a_word_model_with_an_adaptive_softmax_is_evaluated_and_generates(word_corpus: Corpus, tmp_path: Path) -> None:
    config = parse_config(
        {
            "data": {"train": word_corpus.location, "valid": word_corpus.location, "lanes": 4, "window": 10},
            "model": {"hidden": 16, "loss": "adaptive_softmax", "adaptive_cutoffs": [4, 9]},
            "train": {"steps": 3},
            "run": {"folder": tmp_path / "run", "device": "cpu"},
        }
    )
    for _ in Run(config, World(0, 1, torch.device("cpu"))).events():
        pass
    trained = load_model(tmp_path / "run")
    assert any(name.startswith("loss.softmax.tail") for name in trained.stack.named_tensors())
    evaluation = trained.evaluate(word_corpus.location)
    assert 0 < evaluation.loss < 10
    assert evaluation.bits_per_byte is not None and evaluation.bits_per_byte > 0
    assert len(list(generate(trained, length=5))) == 5


def test_a_tied_adaptive_softmax_is_refused() -> None:
    with pytest.raises(ConfigError, match="tied=true can't be combined with loss='adaptive_softmax'"):
        parse_config({"data": {"train": "x"}, "model": {"tied": True, "loss": "adaptive_softmax"}})
