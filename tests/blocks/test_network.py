import pytest
import torch

from stretto.base.errors import ConfigError
from stretto.base.task import Task
from stretto.base.window import Rows
from stretto.blocks.network import build_network
from stretto.config.model import ModelConfig


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (ModelConfig(), "Embedding LSTM LSTM Linear"),
        (ModelConfig(layers=3, layers_per_block=2), "Embedding LSTM LSTM Linear"),
        (ModelConfig(cell="gru", dropout=0.1, layers=1), "Embedding LockedDropout GRU LockedDropout Linear"),
        (ModelConfig(dropout=0.1, locked_dropout=False, layers=1), "Embedding Dropout LSTM Dropout Linear"),
        (ModelConfig(residual=True, norm=True, embedding=8), "Embedding LSTM LayerNorm Residual LayerNorm Linear"),
        (ModelConfig(cell="mingru"), "Embedding MinGRU MinGRU Linear"),
        (ModelConfig(cell="minlstm", layers=3, layers_per_block=2), "Embedding Stack MinLSTM Linear"),
        (ModelConfig(cell="mlstm", residual=True, layers=1), "Embedding Residual Linear"),
        (ModelConfig(cell="slstm", heads=8, layers=1, norm=True), "Embedding SLSTM LayerNorm Linear"),
    ],
)
def test_a_config_becomes_these_blocks(config: ModelConfig, names: str) -> None:
    assert " ".join(type(block).__name__ for block in build_network(config, Task.language(11))) == names


def test_widths_follow_the_config() -> None:
    stack = build_network(ModelConfig(hidden=12, projection=5, layers=3, layers_per_block=2), Task.language(11))
    shapes = {name: list(parameter.shape) for name, parameter in stack.named_parameters()}
    assert shapes["blocks.0.module.weight"] == [11, 5]
    assert shapes["blocks.1.cell.weight_hr_l1"] == [5, 12]
    assert shapes["blocks.2.cell.weight_ih_l0"] == [48, 5]
    assert shapes["blocks.3.module.weight"] == [11, 5]


LABELS = Task("tokens", 11, "class_per_row", 3)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (ModelConfig(layers=1), "Embedding LSTM Linear"),
        (ModelConfig(layers=1, pooling="mean"), "Embedding LSTM MeanPool Linear"),
        (ModelConfig(layers=1, pooling="max", norm=True), "Embedding LSTM LayerNorm MaxPool Linear"),
        (ModelConfig(bidirectional=True), "Embedding BidirectionalLSTM BidirectionalLSTM FinalStates Linear"),
        (ModelConfig(bidirectional=True, cell="gru", residual=True, pooling="max", dropout=0.1, layers=1, hidden=4,
                     embedding=8), "Embedding LockedDropout Residual LockedDropout MaxPool Linear"),
    ],
)  # fmt: skip
def test_a_classifier_summarizes_its_rows(config: ModelConfig, names: str) -> None:
    stack = build_network(config, LABELS)
    assert " ".join(type(block).__name__ for block in stack) == names
    y, _ = stack(torch.zeros(4, 2, dtype=torch.int64), stack.begin(Rows.of(2, 4)))
    assert y.shape == (4, 2, 3)


def test_the_output_layer_of_a_tied_network_uses_the_weight_of_the_embedding() -> None:
    config = ModelConfig(hidden=12, projection=5, dropout=0.1, tied=True)
    for device in ("cpu", "meta"):
        with torch.device(device):
            stack = build_network(config, Task.language(11))
        assert stack.tied_names() == {"blocks.6.module.weight": "blocks.0.module.weight"}
    with pytest.raises(ConfigError, match=r"model\.tied=true needs a language model, .* targets are class_per_row"):
        build_network(config, LABELS)


def test_a_network_must_not_see_its_targets() -> None:
    with pytest.raises(ConfigError, match=r"bidirectional=true would read ahead .*the next token"):
        build_network(ModelConfig(bidirectional=True), Task.language(11))
    with pytest.raises(ConfigError, match=r"bidirectional=true would read ahead .*a forecast"):
        build_network(ModelConfig(bidirectional=True), Task("channels", 2, "horizon", 6))
    with pytest.raises(ConfigError, match=r"model.pooling='mean' summarizes a row"):
        build_network(ModelConfig(pooling="mean"), Task.language(11))
