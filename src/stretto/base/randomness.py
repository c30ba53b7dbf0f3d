"""Positional randomness: a mask is a function of key, time and feature, never of a generator's state.

Masks are computed with integer arithmetic only, which wraps at 64 and 32 bits, so every device gives the same bits.
"""

import torch
from torch import Tensor

# The constants of SplitMix64 and of the 32-bit hash lowbias32, as signed integers; products wrap around on purpose.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_B = 0x94D049BB133111EB - (1 << 64)
WORD_A = 0x7FEB352D
WORD_B = 0x846CA68B - (1 << 32)
_WORD_SPAN = 1 << 32  # the number of 32-bit values


def mix(keys: Tensor) -> Tensor:
    """Hash int64 keys one-to-one, so that neighboring keys give unrelated values."""
    mixed = keys * GOLDEN  # the state of SplitMix64 after `keys` steps from 0
    # `>>` copies the sign bit; the masks make it a logical shift, which keeps the hash one-to-one.
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * MIX_A
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * MIX_B
    return mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)


def _words(keys: Tensor) -> Tensor:
    """Return the low 32 bits of mixed keys, minus 2^31, so that they fit int32."""
    return ((mix(keys) & (_WORD_SPAN - 1)) - (_WORD_SPAN >> 1)).to(torch.int32)


def keep_threshold(keep: float) -> int:
    """Return the int32 that a random 32-bit word is below with probability `keep`."""
    return min(round(keep * _WORD_SPAN), _WORD_SPAN - 1) - (_WORD_SPAN >> 1)  # at most the largest int32


def keep_mask(keys: Tensor, num_features: int, keep: float) -> Tensor:
    """Return a boolean mask [*keys.shape, num_features], true with probability `keep`.

    Features are hashed to 32 bits: a few pairs among the first 10^5 share a mask, but none among the first 10^4.
    """
    features = torch.arange(num_features, dtype=torch.int64, device=keys.device)
    words = _words(keys).unsqueeze(-1) ^ _words(features)
    # Keys and features are hashed already, but masks from their xor alone would be correlated; two more rounds fix it.
    words ^= (words >> 16) & 0xFFFF
    words *= WORD_A
    words ^= (words >> 15) & 0x1FFFF
    words *= WORD_B  # lowbias32's last shift is left out: it changes only the low 16 bits
    return words < keep_threshold(keep)
