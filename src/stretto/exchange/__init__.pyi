from stretto.exchange.keras_import import from_keras as from_keras
from stretto.exchange.onnx_export import OnnxExport as OnnxExport
from stretto.exchange.onnx_export import export_onnx as export_onnx
from stretto.exchange.torch_export import export_torch as export_torch
from stretto.exchange.torch_import import from_torch as from_torch
from stretto.train.weights import load_weights as load_weights
from stretto.train.weights import save_weights as save_weights

__all__: list[str]
