"""Random permutations that are a pure function of a key, independent of the version of any library."""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # this and the next two: the constants of splitmix64
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def splitmix64(key: int, size: int) -> NDArray[np.uint64]:
    """Return the first `size` outputs of the splitmix64 generator seeded with `key`; all are different."""
    words = np.arange(1, size + 1, dtype=np.uint64)
    words *= _GOLDEN
    words += np.uint64(key)
    words ^= words >> np.uint64(30)
    words *= _MIX_A
    words ^= words >> np.uint64(27)
    words *= _MIX_B
    words ^= words >> np.uint64(31)
    return words


def permutation(key: int, size: int) -> NDArray[np.int64]:
    """Return a random permutation of `range(size)` that depends only on `key` and `size`."""
    return splitmix64(key, size).argsort()  # needn't be stable: no two numbers are equal
