"""torch's key-value stores and its gradient bucket, imported in one place.

torch.distributed has these names at run time, but type checkers find them only in the private module that defines them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import GradBucket, HashStore, PrefixStore, Store, TCPStore

__all__ = ["GradBucket", "HashStore", "PrefixStore", "Store", "TCPStore"]
