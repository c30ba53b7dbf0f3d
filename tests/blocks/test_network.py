import pytest

from stretto.base.task import Task
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
