"""WindowSource: the interface of training data; `read_ahead` reads it with a torch DataLoader."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from torch.utils.data import DataLoader, Dataset

from stretto.base.errors import DataError, StrettoError
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.base.window import Window

_PREFETCH_FACTOR = 2  # windows that each worker prefetches


@runtime_checkable
class WindowSource(Protocol):
    """The data that a trainer needs: the window at any position is a pure function of that position.

    A class of your own needs no base class, only these members: docs/how-to/carry-hidden-state.md has a complete one
    ("Windows of your own").
    """

    @property
    def is_stateful(self) -> bool:
        """Whether rows continue from window to window.

        Then all windows of an epoch but the last have the same number of time steps.
        """

    @property
    def lanes(self) -> int:
        """The global number of rows that continue from window to window; 0 if none do."""

    @property
    def lane_indices(self) -> range:
        """The global indices of the lanes in this share."""

    @property
    def num_windows(self) -> int | None:
        """The number of windows in an epoch; None if it is not known in advance."""

    @property
    def bytes_per_token(self) -> float | None:
        """The mean number of bytes of text per token; None if the data is not text."""

    @property
    def task(self) -> Task:
        """The kind and size of inputs and targets."""

    def share(self, index: int, count: int, min_rows: int = 1) -> Self:
        """Return the share of replica `index` of `count`, with `min_rows` rows or more; raise if already a share."""

    def next_position(self, position: Position) -> Position:
        """Return the position of the window after the one at `position`."""

    def fraction(self, position: Position) -> float:
        """Return approximately what fraction of the epoch lies before a position."""

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        """Return the window at a position, with inputs and targets unless they are switched off."""


def check_windows(windows: object) -> None:
    """Raise unless an object is a source of windows; name what to make of rows, and of a DataLoader."""
    if isinstance(windows, WindowSource):
        return
    remedy = "wrap its rows in stretto.data.Batches"
    if isinstance(windows, DataLoader):
        remedy = "use Batches(stretto.data.from_dataset(loader.dataset), max_rows=...)"
    raise DataError(f"windows is an object of type {type(windows).__name__}, which has no windows; {remedy}")


def read_ahead(
    data: WindowSource,
    start: Position,
    *,
    inputs: bool = True,
    targets: bool = True,
    workers: int = 0,
    pin: bool = False,
) -> Iterator[tuple[Window, Position]]:
    """Yield windows from `start` on, epoch after epoch without end, each with the position after it.

    `workers` processes read ahead; with 0, this process reads. Their number changes only the speed. `pin` puts windows
    into pinned memory, as `DataLoader(pin_memory=True)` does.
    """
    if workers < 0:
        raise DataError(f"workers={workers} must be at least 0")
    loader = DataLoader(
        _WindowDataset(data, inputs, targets),
        batch_size=None,  # a window is a batch already
        sampler=_positions(data, start),
        num_workers=workers,
        prefetch_factor=_PREFETCH_FACTOR if workers else None,
        pin_memory=pin,
        worker_init_fn=_ignore_interrupts if workers else None,
    )
    position = start
    for window in loader:
        if isinstance(window, StrettoError):
            raise window
        position = data.next_position(position)
        yield window, position


def _ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C in a worker, to which a terminal sends it too: the rank needs its windows until it has saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _positions(data: WindowSource, position: Position) -> Iterator[Position]:
    """Yield positions in order, without end."""
    while True:
        yield position
        position = data.next_position(position)


@dataclass(frozen=True)
class _WindowDataset(Dataset[Window | StrettoError]):
    """Maps a position to its window, or to the error that reading it raised."""

    data: WindowSource
    inputs: bool
    targets: bool

    def __getitem__(self, position: Position) -> Window | StrettoError:
        try:
            return self.data.read(position, inputs=self.inputs, targets=self.targets)
        except StrettoError as error:
            # Returned, not raised: DataLoader would put the worker's traceback into the message.
            return error
