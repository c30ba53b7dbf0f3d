"""Where a shard of a tensor lies, as torch's safetensors reader wants to be told.

`_HFStorageInfo` is private: torch fills it in by opening every file, and we know it from the manifest.
"""

from pathlib import Path

import torch
from torch.distributed.checkpoint._hf_utils import _HFStorageInfo

HFStorageInfo = _HFStorageInfo


def make_storage_info(path: Path, shape: torch.Size, dtype: torch.dtype) -> HFStorageInfo:
    """Return the entry for one shard in one file."""
    return _HFStorageInfo(str(path), shape, dtype)
