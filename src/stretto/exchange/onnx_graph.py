"""Graph: a builder of ONNX graphs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.extras import import_optional_dependency

OPSET = 18
# The oldest format that supports these operators, for older runtimes.
IR_VERSION = 8


@dataclass
class Graph:
    """Nodes, weights, inputs and outputs of a graph, each by name."""

    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    prefix: str = ""
    _num_values: int = 0

    def __post_init__(self) -> None:
        self._onnx = import_optional_dependency("onnx", "onnx", "an export to ONNX")

    @property
    def int32(self) -> int:
        """ONNX's code for the type int32."""
        return int(self._onnx.TensorProto.INT32)

    def weight(self, name: str, value: Tensor | NDArray[Any]) -> str:
        """Add an array to the model under a name; return the name."""
        array = value.detach().numpy() if isinstance(value, Tensor) else value
        self.weights.append(self._onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def int64_constant(self, *numbers: int) -> str:
        """Add integers, which operators take as axes and shapes; return their name."""
        return self.weight(self._new_name("indices"), np.array(numbers, dtype=np.int64))

    def node(self, operator: str, *inputs: str, **attributes: object) -> str:
        """Add an operator with one output; return the output's name."""
        return self.multi_output_node(operator, 1, *inputs, **attributes)[0]

    def multi_output_node(self, operator: str, size: int, /, *inputs: str, **attributes: object) -> list[str]:
        """Add an operator with `size` outputs; return their names."""
        outputs = [self._new_name(operator) for _ in range(size)]
        self.nodes.append(self._onnx.helper.make_node(operator, inputs, outputs, **attributes))
        return outputs

    def input(self, name: str, like: Tensor, dims: Sequence[str | int]) -> str:
        """Add an input of the model; return its name."""
        self.inputs.append(self._value(name, like, dims))
        return name

    def output(self, name: str, value: str, like: Tensor, dims: Sequence[str | int]) -> None:
        """Add an output of the model: a value under a name."""
        self.outputs.append(self._value(name, like, dims))
        self.nodes.append(self._onnx.helper.make_node("Identity", [value], [name]))

    def loop_body(self, inputs: Sequence[str], outputs: Sequence[str], like: Tensor) -> Any:  # noqa: ANN401 - no types
        """Return this graph as the body of a loop; it can use the weights of the enclosing graph."""
        values = [[self._value(name, like, None) for name in names] for names in (inputs, outputs)]
        return self._onnx.helper.make_graph(self.nodes, "body", *values)

    def model(self, metadata: dict[str, str]) -> Any:  # noqa: ANN401 - onnx has no types
        """Return the graph as an ONNX model."""
        helper = self._onnx.helper
        graph = helper.make_graph(self.nodes, "stretto", self.inputs, self.outputs, self.weights)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="stretto"
        )
        helper.set_model_props(model, metadata)
        return model

    def _value(self, name: str, like: Tensor, dims: Sequence[str | int] | None) -> Any:  # noqa: ANN401
        kind = self._onnx.helper.np_dtype_to_tensor_dtype(like.numpy().dtype)
        return self._onnx.helper.make_tensor_value_info(name, kind, dims)

    def _new_name(self, hint: str) -> str:
        self._num_values += 1
        return f"{self.prefix}{hint.lower()}_{self._num_values}"
