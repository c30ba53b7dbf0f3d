"""Graph: a builder of ONNX graphs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.extras import import_optional_dependency

OPSET = 18  # the first in which Split has `num_outputs`
IR_VERSION = 8  # the oldest file format that supports this opset, so that older runtimes can read the model


@dataclass
class Graph:
    """An ONNX graph under construction; all `add_` methods but `add_output` return the names of the values they add."""

    nodes: list[Any] = field(default_factory=list)
    initializers: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    prefix: str = ""  # of generated names; inputs, outputs and initializers have names that the caller gives
    _num_values: int = 0

    def __post_init__(self) -> None:
        self._onnx = import_optional_dependency("onnx", "onnx", "an export to ONNX")

    @property
    def int32(self) -> int:
        """ONNX's code for the type int32."""
        return int(self._onnx.TensorProto.INT32)

    @property
    def int64(self) -> int:
        """ONNX's code for the type int64."""
        return int(self._onnx.TensorProto.INT64)

    def add_initializer(self, name: str, value: Tensor | NDArray[Any]) -> str:
        """Add a constant array, such as a weight; return its name."""
        array = value.detach().numpy() if isinstance(value, Tensor) else value
        self.initializers.append(self._onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add_constant(self, array: NDArray[Any]) -> str:
        """Add a constant that has no name of its own; return its name."""
        return self.add_initializer(self._new_name("constant"), array)

    def add_int64_constant(self, *numbers: int) -> str:
        """Add a 1-D int64 constant, such as axes or a shape; return its name."""
        return self.add_constant(np.array(numbers, dtype=np.int64))

    def add_node(self, op_type: str, *inputs: str, **attributes: object) -> str:
        """Add a node with one output; return the output's name."""
        return self.add_multi_output_node(op_type, 1, *inputs, **attributes)[0]

    def add_multi_output_node(self, op_type: str, count: int, /, *inputs: str, **attributes: object) -> list[str]:
        """Add a node with `count` outputs; return their names."""
        outputs = [self._new_name(op_type) for _ in range(count)]
        self.nodes.append(self._onnx.helper.make_node(op_type, inputs, outputs, **attributes))
        return outputs

    def add_input(self, name: str, dtype: torch.dtype, dims: Sequence[str | int]) -> str:
        """Add an input of the model; return its name. A dimension given by a name can have any size."""
        self.inputs.append(self._value_info(name, dtype, dims))
        return name

    def add_output(self, name: str, value: str, dtype: torch.dtype, dims: Sequence[str | int]) -> None:
        """Make the existing value `value` an output of the model, called `name`."""
        self.outputs.append(self._value_info(name, dtype, dims))
        self.nodes.append(self._onnx.helper.make_node("Identity", [value], [name]))

    def scan_body(self, inputs: Sequence[str], outputs: Sequence[str], dtype: torch.dtype) -> Any:  # noqa: ANN401
        """Return the nodes as a Scan's body with inputs and outputs of `dtype`; constants belong in the outer graph."""
        values = [[self._value_info(name, dtype, None) for name in names] for names in (inputs, outputs)]
        return self._onnx.helper.make_graph(self.nodes, "body", *values)

    def to_model(self, metadata: dict[str, str]) -> Any:  # noqa: ANN401 - onnx has no types
        """Return the graph as an ONNX `ModelProto`."""
        helper = self._onnx.helper
        graph = helper.make_graph(self.nodes, "stretto", self.inputs, self.outputs, self.initializers)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="stretto"
        )
        helper.set_model_props(model, metadata)
        return model

    def _value_info(self, name: str, dtype: torch.dtype, dims: Sequence[str | int] | None) -> Any:  # noqa: ANN401
        elem_type = self._onnx.helper.np_dtype_to_tensor_dtype(torch.empty(0, dtype=dtype).numpy().dtype)
        return self._onnx.helper.make_tensor_value_info(name, elem_type, dims)

    def _new_name(self, hint: str) -> str:
        self._num_values += 1
        return f"{self.prefix}{hint.lower()}_{self._num_values}"
