"""ProfileInput: the model, data and settings that a profile is measured for."""

import copy
import os
import platform
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from stretto.base.fingerprint import fingerprint as fingerprint_of
from stretto.base.optimizer import OptimizerFactory
from stretto.base.position import Position
from stretto.base.tf32 import fp32_precisions
from stretto.base.window import Window
from stretto.blocks.check_widths import ModelInput, check_inputs
from stretto.blocks.initialize import initialize
from stretto.blocks.loss_weights import attach_loss
from stretto.blocks.losses import Loss
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.stack import Stack
from stretto.blocks.torch_losses import as_loss
from stretto.config.layout import Layout
from stretto.engine.engine import window_tensor
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.precision import Precision, autocast
from stretto.measure.workload import find_workload
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.mesh.world import World
from stretto.plan.hardware import Arithmetic
from stretto.plan.profile import VERSION
from stretto.plan.workload import Workload
from stretto.windows.loader import WindowSource


@dataclass(frozen=True)
class ProfileInput:
    """A model with its loss and data, and the training settings that its profile depends on."""

    model: Stack  # may be on the meta device
    loss: Loss
    windows: WindowSource
    make_optimizer: OptimizerFactory
    device: torch.device
    precision: Precision = "fp32"
    seed: int = 1
    threads: int = 0  # per rank on a CPU; 0 for an equal share of the cores
    can_cut_time: bool = True  # whether a plan may have chunks or spans

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", as_loss(self.loss))
        check_inputs(ModelInput.of(self.model), self.windows.task)

    @cached_property
    def window(self) -> Window:
        """The first global batch, on which blocks and steps are measured."""
        return self.windows.read(Position())

    @cached_property
    def workload(self) -> Workload:
        """The row lengths of the first global batches, a sample of all the data: see `find_workload`."""
        causal, stride = self.model.causal, self.model.stride
        return find_workload(self.windows, is_causal=causal, stride=stride, can_cut_time=self.can_cut_time)

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint of hardware, torch, model, loss, batch and settings; runs with the same one share a profile."""
        window = self.windows.read(Position(), inputs=False, targets=False)
        facts = {
            "version": VERSION,
            "device": self.device_name,
            "devices": os.cpu_count() if self.is_cpu else torch.accelerator.device_count(),
            "torch": torch.__version__,
            "blocks": [f"{block}{[tuple(weight.shape) for weight in block.parameters()]}" for block in self.model],
            "tied": self.model.tied_names(),
            "loss": re.sub(r" at 0x\w+", "", repr(self.loss)),  # without memory addresses
            "batch": [window.num_rows, window.num_steps],
            "precision": self.precision,
            "fp32 on cuda": None if self.is_cpu else fp32_precisions(),
            "optimizer": self._describe_optimizer(),
            "threads": self.threads if self.is_cpu else 0,
        }
        return fingerprint_of(facts)[:16]

    @property
    def arithmetic(self) -> Arithmetic:
        """How a GPU computes matrix products: in `precision`, or with TF32 if torch may use that for RNNs in fp32."""
        return "tf32" if self.precision == "fp32" and fp32_precisions()["rnn"] == "tf32" else self.precision

    @property
    def is_cpu(self) -> bool:
        """Whether ranks compute on the CPU, and so share its cores and memory."""
        return self.device.type == "cpu"

    @property
    def device_name(self) -> str:
        """The name of the device, such as `NVIDIA H100 80GB HBM3`."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{platform.machine()} CPU, {os.cpu_count()} cores" if self.is_cpu else self.device.type

    @property
    def device_memory(self) -> float:
        """The bytes of memory of one CUDA GPU, or of the whole machine for any other device."""
        if self.device.type == "cuda":
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_per_rank(self, ranks_on_node: int) -> float:
        """Return the bytes that each rank can use."""
        return self.device_memory / (ranks_on_node if self.is_cpu else 1)

    def num_threads(self, ranks_on_node: int) -> int:
        """Return how many threads each rank computes with on a CPU."""
        return self.threads or max(1, (os.cpu_count() or 1) // ranks_on_node)

    def set_threads(self, ranks_on_node: int) -> None:
        """Set the number of torch's threads on this rank, if it computes on a CPU."""
        if self.is_cpu:
            torch.set_num_threads(self.num_threads(ranks_on_node))

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which blocks run."""
        return autocast(self.device, self.precision)

    def crop(self, rows: int, steps: int) -> Window:
        """Return the first `rows` rows and `steps` time steps of the batch."""
        part = self.window[:rows]
        return replace(
            part,
            num_steps=steps,
            lengths=part.lengths.clamp(max=steps),
            inputs=window_tensor(part, "inputs")[:steps],
            targets=self.crop_targets(rows, steps, self.model.stride),
        )

    def crop_targets(self, rows: int, steps: int, stride: int = 1) -> Tensor:
        """Return the targets of the first `rows` rows and `steps` time steps; each `stride` of them make one output."""
        targets = window_tensor(self.window, "targets")[:, :rows]
        if not isinstance(self.loss, RowLoss) or self.loss.targets_per_step:
            return targets[:steps]
        # At most half as many as there are outputs: CTC has room for these, with a blank between equal ones.
        return targets if steps == self.window.num_steps else targets[: -(-steps // stride) // 2]

    def make_engine(self, chunks: int) -> PipelineEngine:
        """Return an engine that runs the whole model on this rank, in `chunks` chunks."""
        stack, loss = copy.deepcopy((self.model, self.loss))
        stack = initialize(attach_loss(stack, loss), self.seed, self.device)
        single_rank = Mesh(World(rank=0, size=1, device=self.device), Topology(1, 1))
        return PipelineEngine(stack, loss, Layout(chunks=chunks), single_rank, precision=self.precision)

    def make_loss(self) -> Loss:
        """Return a copy of the loss; if it has weights, they are drawn."""
        last_block, loss = copy.deepcopy((self.model[-1:], self.loss))
        initialize(attach_loss(last_block, loss), self.seed, self.device, model=self.model)
        return loss

    def _describe_optimizer(self) -> list[object]:
        """Return the optimizer's class and which settings are nonzero; their exact values don't change its cost."""
        optimizer = self.make_optimizer([nn.Parameter(torch.zeros(1))])
        return [type(optimizer).__name__, {name: bool(value) for name, value in optimizer.defaults.items()}]
