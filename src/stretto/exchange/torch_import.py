"""from_torch: make a stack from torch modules, a state dict, or a file with a state dict."""

import copy
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stretto.base.bounded_read import check_expanded_size, parse_json
from stretto.base.errors import ConfigError, DataError
from stretto.base.reason import class_and_reason
from stretto.base.trees import tensors_of
from stretto.base.window import Rows
from stretto.blocks.dropout import Dropout
from stretto.blocks.pointwise import Pointwise
from stretto.blocks.stack import Stack
from stretto.exchange.imported_layer import ImportedLayer, LayerKind, Weights, import_layer, residual, stack_layers
from stretto.exchange.torch_export import LAYERS_METADATA_KEY, POOLING_KINDS

Modules = nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]

_ARCHIVE_START = b"PK\x03\x04"  # by which torch, too, recognizes an archive
_LAYER_KINDS: dict[type[nn.Module], LayerKind] = {getattr(nn, kind): kind for kind in get_args(LayerKind)}
_RECURRENT_WEIGHT = re.compile(r"(weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)_l\d+(_reverse)?")


def from_torch(source: Modules | Weights | Path | str, *, module: nn.Module | None = None) -> Stack:
    """Return a stack with the weights of torch layers, one block per layer: `nn.LSTM(4, 8, num_layers=2)` becomes two.

    `source` is a module (`nn.LSTM`, `nn.GRU`, an `nn.Sequential`), a list or dict of modules in the order they run, a
    state dict, or a file with a state dict (safetensors or `torch.save`, loaded without running code from it; all
    entries must be tensors). Supported layers are Embedding, LSTM, GRU, Linear, LayerNorm and Dropout. A stack is
    time-major, whatever `batch_first` is. Modules on the meta device give a stack on the meta device, which
    `make_engine` or `stretto.nn.initialize` initializes from a seed.

    A dict of layers needs the `module` that they are from: its outputs must equal those of the stack, on random inputs,
    because all that its `forward` does between the layers would be lost.
    """
    if isinstance(source, Path | str):
        layers = _from_file(Path(source))
    elif isinstance(source, nn.Module):
        layers = _from_modules(_named_layers(source))
    elif not isinstance(source, Mapping):
        layers = _from_modules({str(index): module for index, module in enumerate(source)})
    elif all(isinstance(value, nn.Module) for value in source.values()):
        modules = {name: value for name, value in source.items() if isinstance(value, nn.Module)}
        _check_outputs(modules, module)
        layers = _from_modules(modules)
    else:
        layers = _from_weights(_check_tensors(source, "the state dict"), is_ordered=True)
    return stack_layers(layers)


def _check_outputs(modules: dict[str, nn.Module], module: nn.Module | None) -> None:
    """Raise if a module does more than run its layers in order, such as an activation between them."""
    if module is None:
        raise ConfigError(
            f"the layers {', '.join(modules)} don't say what is between them; give from_torch the module that they are "
            "from, too, as module=..., or train it as it is with stretto.parallelize"
        )
    modules, module = copy.deepcopy((modules, module))
    with (
        torch.device("cpu"),
        torch.random.fork_rng([]),
        torch.no_grad(),
    ):  # also where a factory runs on the meta device
        for each in (module, *modules.values()):
            is_meta = any(parameter.is_meta for parameter in each.parameters())
            each.to_empty(device="cpu") if is_meta else each.cpu()
            for tensor in each.double().eval().state_dict().values():
                if is_meta and tensor.is_floating_point():
                    tensor.normal_()
        layers = [child for each in modules.values() for child in each.modules()]
        first = next(child for child in layers if type(child) in _LAYER_KINDS)
        x = torch.randn(9, 16, next(first.parameters()).shape[-1], dtype=torch.float64)
        if isinstance(first, nn.Embedding):
            x = torch.randint(first.num_embeddings, (9, 16))
        stack = stack_layers(_from_modules(modules)).eval()
        y, _ = stack(x, stack.begin(Rows.of(16, 9, dtype=torch.float64)))
        is_batch_first = any(isinstance(child, nn.RNNBase) and child.batch_first for child in layers)
        try:
            output = tensors_of(module(x.transpose(0, 1) if is_batch_first else x))[0].flatten()
        except Exception as error:
            raise ConfigError(
                f"from_torch can't call {type(module).__name__} with one input ({class_and_reason(error)}); train it "
                "as it is with stretto.parallelize"
            ) from error
    same = [each.flatten() for each in (y, y.transpose(0, 1), y[-1])]  # a loss may be of the last step only
    if not any(output.shape == each.shape and torch.allclose(output, each) for each in same):
        raise ConfigError(
            f"{type(module).__name__} computes something else than its layers {', '.join(modules)} in order; a stack "
            "would leave out what is between them, so train it as it is with stretto.parallelize"
        )


def _named_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a container, or a single supported layer under the name of its class."""
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return dict(module.named_children())
    if type(module) in (*_LAYER_KINDS, nn.Dropout):
        return {type(module).__name__.lower(): module}
    raise ConfigError(
        f"{type(module).__name__} is not a module that from_torch supports; give its layers as "
        "{name: module} in the order in which they run, or its state_dict()"
    )


def _from_modules(
    modules: Mapping[str, nn.Module], imported: dict[Tensor, Tensor | nn.Module] | None = None
) -> list[ImportedLayer]:
    """Import modules in order; `imported` has the new weights of embeddings and linear layers before them."""
    imported = {} if imported is None else imported
    layers: list[ImportedLayer] = []
    for name, module in modules.items():
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            layers += _from_modules({f"{name}.{child}": inner for child, inner in module.named_children()}, imported)
        elif type(module) is nn.Dropout:
            layers.append(ImportedLayer(name, [Dropout(module.p)]))
        elif type(module) is not nn.Identity:
            layers.append(_from_module(name, module))
            block = layers[-1].blocks[0]
            if isinstance(module, nn.Embedding | nn.Linear) and isinstance(block, Pointwise):
                # Layers that share their weight still do.
                block.module.weight = imported.setdefault(module.weight, block.module.weight)
    return layers


def _from_module(name: str, module: nn.Module) -> ImportedLayer:
    kind = _LAYER_KINDS.get(type(module))
    if kind is None:
        raise ConfigError(
            f"from_torch does not support {name} ({type(module).__name__}); choose from "
            f"{', '.join(layer_type.__name__ for layer_type in _LAYER_KINDS)} and Dropout"
        )
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        raise ConfigError(f"{name} has max_norm={module.max_norm}, which stretto does not support; use max_norm=None")
    if isinstance(module, nn.LayerNorm):
        if len(module.normalized_shape) != 1 or not module.elementwise_affine or module.bias is None:
            raise ConfigError(f"{name} must normalize over one dimension, with weight and bias; use nn.LayerNorm(n)")
        return import_layer(name, kind, module.state_dict(), epsilon=module.eps)
    # nn.LSTM and nn.GRU apply dropout between their layers, not after the last.
    dropout = module.dropout if isinstance(module, nn.RNNBase) else 0.0
    return import_layer(name, kind, module.state_dict(), dropout=dropout)


def _from_weights(weights: Weights, *, is_ordered: bool) -> list[ImportedLayer]:
    """Infer layers from the names and shapes of their weights. If not `is_ordered`, assume the usual layer order."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        layer_name, _, key = name.rpartition(".")
        layers.setdefault(layer_name, {})[key] = tensor
    kinds: dict[str, LayerKind] = {}
    for layer_name, layer_weights in layers.items():
        is_before_rnn = not any(kind in ("LSTM", "GRU") for kind in kinds.values())
        kinds[layer_name] = _infer_kind(layer_name, layer_weights, layers, is_before_rnn=is_before_rnn)
    if not is_ordered:
        if "LayerNorm" in kinds.values():
            name = next(layer_name for layer_name, kind in kinds.items() if kind == "LayerNorm")
            raise ConfigError(
                f"the position of {name} among the layers is not in the file; give from_torch a state dict with its "
                "layers in the order in which they run"
            )
        order = ("Embedding", "LSTM", "GRU", "Linear")
        kinds = dict(sorted(kinds.items(), key=lambda item: (order.index(item[1]), _natural_sort_key(item[0]))))
    return [import_layer(layer_name or kind.lower(), kind, layers[layer_name]) for layer_name, kind in kinds.items()]


def _infer_kind(layer_name: str, weights: Weights, layers: Mapping[str, Weights], *, is_before_rnn: bool) -> LayerKind:
    prefix = f"{layer_name}." if layer_name else ""
    if all(_RECURRENT_WEIGHT.fullmatch(key) for key in weights):
        return _infer_recurrent_kind(prefix, weights)
    if not {"weight"} <= set(weights) <= {"weight", "bias"}:
        key = next((key for key in weights if key not in ("weight", "bias")), "bias")  # or a bias without a weight
        raise ConfigError(f"{prefix}{key} is not a weight of a layer that from_torch supports; remove that layer")
    if weights["weight"].dim() == 1 and "bias" in weights:
        return "LayerNorm"
    if weights["weight"].dim() != 2:
        raise ConfigError(
            f"{prefix}weight has shape {list(weights['weight'].shape)}, which no supported layer has; remove that layer"
        )
    if "bias" in weights:
        return "Linear"
    # An embedding looks like a linear layer without bias, but comes before the first LSTM or GRU and feeds it.
    rnn_input_sizes = [layer["weight_ih_l0"].shape[1] for layer in layers.values() if "weight_ih_l0" in layer]
    feeds_rnn = is_before_rnn and weights["weight"].shape[1] in rnn_input_sizes[:1]
    return "Embedding" if feeds_rnn or _is_named_embedding(layer_name) else "Linear"


def _is_named_embedding(layer_name: str) -> bool:
    """Return whether a name suggests an embedding: `encoder.embed_tokens`, `wordEmbedding`, `emb.0`; not `member.0`."""
    names = [name for name in layer_name.split(".") if not name.isdecimal()]
    return bool(names) and re.search(r"(?<![A-Za-z])[Ee]mb|Emb|EMB", names[-1]) is not None


def _infer_recurrent_kind(prefix: str, weights: Weights) -> LayerKind:
    num_layers = sum(re.fullmatch(r"weight_ih_l\d+", key) is not None for key in weights)
    needed = {f"{part}_l{layer}" for part in ("weight_ih", "weight_hh") for layer in range(num_layers)}
    missing = sorted(needed - set(weights)) or ([] if num_layers else ["weight_ih_l0"])
    if missing:
        raise ConfigError(f"{prefix}{missing[0]} is missing; give all weights of the layer")
    for key in weights:
        if weights[key].dim() != (1 if key.startswith("bias") else 2):
            raise ConfigError(
                f"{prefix}{key} has shape {list(weights[key].shape)}, which no LSTM or GRU has; give a state_dict()"
            )
    gate_rows, out_features = weights["weight_hh_l0"].shape  # out_features is proj_size or, without it, hidden_size
    hidden_size = weights["weight_hr_l0"].shape[1] if "weight_hr_l0" in weights else out_features
    kinds: dict[int, LayerKind] = {4: "LSTM", 3: "GRU"}  # by number of gates
    if gate_rows % hidden_size or gate_rows // hidden_size not in kinds:
        raise ConfigError(
            f"{prefix}weight_hh_l0 has shape {[gate_rows, out_features]}, which neither an LSTM nor a GRU has; "
            "from_torch supports no other recurrent layer"
        )
    return kinds[gate_rows // hidden_size]


def _from_file(path: Path) -> list[ImportedLayer]:
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"{path} {problem}; give a file of weights")
    if path.suffix == ".safetensors":
        return _from_safetensors(path)
    try:
        _check_archive(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except Exception:  # noqa: BLE001 - torch.load raises many kinds of errors
        # Torch's message is left out: it advises weights_only=False, which runs code from the file.
        raise DataError(
            f"{path} is not a file of tensors: it is damaged or holds other objects; use a state_dict() written by "
            "torch.save or safetensors"
        ) from None
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    weights = _check_tensors(content, str(path))
    # A tensor in the file may repeat one number with a stride of 0, at any shape.
    check_expanded_size(path, sum(tensor.numel() * tensor.element_size() for tensor in weights.values()))
    return _from_weights(weights, is_ordered=True)


def _check_archive(path: Path) -> None:
    """Raise if a file is a ZIP archive, as written by `torch.save`, whose content is too large."""
    with path.open("rb") as file:
        if file.read(len(_ARCHIVE_START)) == _ARCHIVE_START:
            with zipfile.ZipFile(file) as archive:
                check_expanded_size(path, sum(member.file_size for member in archive.infolist()))


def _from_safetensors(path: Path) -> list[ImportedLayer]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
    except SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file, or is damaged ({error}); write it again") from None
    if weights and all(name.startswith("blocks.") for name in weights):
        raise ConfigError(
            f"{path} holds the weights of a stretto stack; use it as model.weights, or load it with "
            "stretto.exchange.load_weights into a stack with the same blocks"
        )
    if LAYERS_METADATA_KEY not in metadata:
        # A safetensors file is sorted by name, so the order of the layers is lost.
        return _from_weights(weights, is_ordered=False)
    try:
        return [_from_metadata(layer, weights) for layer in parse_json(metadata[LAYERS_METADATA_KEY])]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} has an invalid list of layers ({class_and_reason(error)}); export it again") from None


def _from_metadata(layer: dict[str, object], weights: Weights) -> ImportedLayer:
    """Return a layer from its entry in the list that `export_torch` writes."""
    name = str(layer["name"])
    if layer["kind"] in POOLING_KINDS:
        num_features = int(str(layer["num_features"]))
        return ImportedLayer(name, [POOLING_KINDS[str(layer["kind"])](num_features)], num_features, num_features)
    kind: LayerKind | None = next((known for known in get_args(LayerKind) if known == layer["kind"]), None)
    if kind is None:
        raise ConfigError(f"from_torch does not support {name} ({layer['kind']}); build the stack by hand")
    prefix = f"{name}."
    layer_weights = {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}
    epsilon = layer.get("eps")
    imported = import_layer(name, kind, layer_weights, epsilon=epsilon if isinstance(epsilon, float) else 1e-5)
    return residual(imported) if layer.get("residual") else imported


def _check_tensors(content: object, source: str) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        raise DataError(
            f"{source} holds a value of type {type(content).__name__}, not a state dict; save a state_dict()"
        )
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise DataError(f"{name!r} in {source} is not a tensor ({type(value).__name__}); give tensors only")
    return {str(name): value for name, value in content.items()}


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a key by which `lstm.2` sorts before `lstm.10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
