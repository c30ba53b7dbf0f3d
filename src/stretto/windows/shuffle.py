"""Shuffle: permutations that are a pure function of a key, the same in every version of every library."""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def splitmix64(key: int, size: int) -> NDArray[np.uint64]:
    """Return `size` numbers that look random, the outputs of splitmix64 from `key`; no two of them are equal."""
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
    """Return the numbers below `size` in an order that `key` alone decides."""
    return splitmix64(key, size).argsort()
