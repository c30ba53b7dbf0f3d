"""export_torch: write a stack's weights to a safetensors file, named as in the state dicts of torch modules."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from stretto.base.disk import explain_write_errors, write_atomic
from stretto.base.errors import ConfigError
from stretto.blocks.activation_penalty import ActivationPenalty
from stretto.blocks.bidirectional import Bidirectional
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout, LockedDropout
from stretto.blocks.head_loss import check_has_output_layer
from stretto.blocks.pointwise import Pointwise
from stretto.blocks.pooling import FinalStates, MaxPool, MeanPool, Pooling
from stretto.blocks.recurrent import GRU, LSTM
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack
from stretto.exchange.onnx_blocks import enumerate_blocks, has_forward_of

LAYERS_METADATA_KEY = "stretto.layers"
# Blocks that torch has no module for, but that have no weights either: they are listed, so that the file is complete.
POOLING_KINDS: dict[str, type[Pooling]] = {kind.__name__: kind for kind in (FinalStates, MaxPool, MeanPool)}


@dataclass(frozen=True)
class TorchLayer:
    """A torch module: its class name (`kind`), its state dict, and its arguments and `residual` flag (`options`)."""

    kind: str
    weights: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """The module's name, before modules of the same class are numbered."""
        return {"LayerNorm": "norm"}.get(self.kind, self.kind.lower())


def export_torch(stack: Stack, path: Path | str) -> dict[str, dict[str, object]]:
    """Write a stack's weights under the names of torch modules; return the modules by name, in the order they run.

    Consecutive LSTMs (or GRUs) of equal hidden size and settings become one module (`lstm.weight_ih_l1`). If a class
    occurs more than once, its modules are numbered (`lstm.0.weight_ih_l0`). Each module is returned as a dict:
    its class as `kind`, its arguments if `from_torch` supports it, and `residual` if its input is added to its output.
    """
    check_has_output_layer(stack.loss)
    weights, modules = torch_weights(stack)
    layers = [{"name": name, **options} for name, options in modules.items()]
    path = Path(path)
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save(weights, {LAYERS_METADATA_KEY: json.dumps(layers)}))
    return modules


def torch_weights(stack: Stack) -> tuple[dict[str, Tensor], dict[str, dict[str, object]]]:
    """Return a stack's weights under the names of torch modules, and the modules that `export_torch` returns."""
    stack.check_complete()
    if not has_forward_of(stack, Stack):
        raise ConfigError(
            f"the stack's class {type(stack).__name__} has its own forward, so torch modules can't replace it; use "
            "stretto.exchange.save_weights, which writes any stack"
        )
    layers = _merge_layers(_block_layers(stack, ""))
    counts = Counter(layer.prefix for layer in layers)
    seen: Counter[str] = Counter()
    weights: dict[str, Tensor] = {}
    modules: dict[str, dict[str, object]] = {}
    for layer in layers:
        name = layer.prefix if counts[layer.prefix] == 1 else f"{layer.prefix}.{seen[layer.prefix]}"
        seen[layer.prefix] += 1
        modules[name] = {"kind": layer.kind, **layer.options}
        weights |= {f"{name}.{key}": tensor.detach().cpu().clone() for key, tensor in layer.weights.items()}
    return weights, modules


def _block_layers(block: Block, label: str) -> list[TorchLayer]:
    """Return the torch modules for a block; raise ConfigError if torch has none, or the block overrides `forward`."""
    if has_forward_of(block, Stack):
        return [layer for name, inner in enumerate_blocks(block, label) for layer in _block_layers(inner, name)]
    if has_forward_of(block, Dropout, LockedDropout, ActivationPenalty):
        return []  # no weights, and not needed for inference
    if has_forward_of(block, Residual):
        layers = [] if isinstance(block.block, Stack) else _block_layers(block.block, label)
        if len(layers) == 1:  # a skip connection around a stack or around dropout is an error, raised below
            return [replace(layers[0], options={**layers[0].options, "residual": True})]
    rnn_blocks = (LSTM, GRU, Bidirectional)
    if has_forward_of(block, *rnn_blocks) and isinstance(block, rnn_blocks):  # isinstance narrows the type for mypy
        rnn = block.cell
        for rnn_class in (nn.LSTM, nn.GRU):
            if has_forward_of(rnn, rnn_class):
                return [TorchLayer(rnn_class.__name__, dict(rnn.state_dict()), _rnn_options(rnn))]
    if has_forward_of(block, *POOLING_KINDS.values()) and isinstance(block, Pooling):
        kind_name = next(name for name, kind in POOLING_KINDS.items() if isinstance(block, kind))
        return [TorchLayer(kind_name, {}, {"num_features": block.num_features})]
    if has_forward_of(block, Pointwise):
        module = block.module
        # stretto's Embedding holds a subclass of nn.Embedding that only initializes its weights differently.
        torch_class = next((kind for kind in (nn.Embedding, nn.Linear, nn.LayerNorm) if isinstance(module, kind)), None)
        if torch_class is None or has_forward_of(module, torch_class):
            kind_name = (torch_class or type(module)).__name__
            return [TorchLayer(kind_name, dict(module.state_dict()), _module_options(module))]
    raise ConfigError(
        f"block {label} ({type(block).__name__}) has no equivalent in torch, so its weights have no torch names; use "
        "stretto.exchange.save_weights, which writes any stack"
    )


def _rnn_options(rnn: nn.RNNBase) -> dict[str, object]:
    """Return the required arguments, `num_layers`, and the other arguments that differ from torch's defaults."""
    options: dict[str, object] = {"input_size": rnn.input_size, "hidden_size": rnn.hidden_size}
    defaults = {"num_layers": 1, "bias": True, "bidirectional": False, "proj_size": 0}
    values = {name: getattr(rnn, name) for name in defaults}
    return options | {name: value for name, value in values.items() if name == "num_layers" or value != defaults[name]}


def _module_options(module: nn.Module) -> dict[str, object]:
    if isinstance(module, nn.Embedding):
        return {"num_embeddings": module.num_embeddings, "embedding_dim": module.embedding_dim}
    if isinstance(module, nn.Linear):
        options: dict[str, object] = {"in_features": module.in_features, "out_features": module.out_features}
        return options if "bias" in module.state_dict() else {**options, "bias": False}
    if isinstance(module, nn.LayerNorm):
        return {"normalized_shape": list(module.normalized_shape), "eps": module.eps}
    return {}


def _merge_layers(layers: list[TorchLayer]) -> list[TorchLayer]:
    """Merge consecutive recurrent layers that one multi-layer torch module can hold."""
    merged: list[TorchLayer] = []
    for layer in layers:
        if merged and _can_merge(merged[-1], layer):
            previous = merged.pop()
            depth = previous.options["num_layers"]
            weights = {_shift_layer_index(name, depth): tensor for name, tensor in layer.weights.items()}
            options = {**previous.options, "num_layers": depth + layer.options["num_layers"]}
            layer = TorchLayer(previous.kind, {**previous.weights, **weights}, options)
        merged.append(layer)
    return merged


def _can_merge(one: TorchLayer, other: TorchLayer) -> bool:
    if one.kind != other.kind or one.kind not in ("LSTM", "GRU") or "residual" in one.options | other.options:
        return False
    # These two need not be equal, so overwrite them on both sides before all options are compared.
    ignored = {"input_size": None, "num_layers": None}
    return one.options | ignored == other.options | ignored


def _shift_layer_index(name: str, depth: int) -> str:
    """Return `weight_ih_l3` for `weight_ih_l1` and a depth of 2."""
    return re.sub(r"_l(\d+)", lambda match: f"_l{int(match[1]) + depth}", name)
