"""check_window_stride: whether the windows of rows that continue end between the time steps of a strided model."""

from stretto.base.errors import ConfigError
from stretto.base.position import Position
from stretto.windows.loader import WindowSource


def check_window_stride(windows: WindowSource, stride: int) -> None:
    """Raise if windows of rows that continue would cut one of the model's time steps, each made of `stride`.

    `windows` is the data of all replicas, so all ranks raise alike. All windows of an epoch but the last have the
    number of time steps of the first; after the last one no row continues.
    """
    if stride == 1 or not windows.is_stateful or windows.num_windows == 1:
        return
    num_steps = windows.read(Position(), inputs=False, targets=False).num_steps
    if num_steps % stride:
        raise ConfigError(
            f"rows continue from window to window, but windows have {num_steps} time steps, not a multiple of the "
            f"model's stride {stride}; use windows (data.window) of {-(-num_steps // stride) * stride}"
        )
