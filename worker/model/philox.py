"""Uniform numbers that are a function of their key and counter alone.

Philox4x32-10 of J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). No state exists,
so a draw cannot depend on other requests, on the order of draws or on what was drawn before.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
Counter = tuple[int, int, int, int]


def philox4x32(counter: Counter, key: tuple[int, int], rounds: int = 10) -> Counter:
    """Four 32-bit words from four words of counter and two of key."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(rounds):
        low, high = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (high >> 32) ^ b ^ k0, high & _MASK, (low >> 32) ^ d ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return a, b, c, d


def uniform(seed: int, choice: int, position: int) -> float:
    """A number of [0, 1) with 53 random bits for one draw. Only the low 64 bits of `seed` count."""
    key = (seed & _MASK, seed >> 32 & _MASK)
    a, b, _, _ = philox4x32((position & _MASK, position >> 32 & _MASK, choice & _MASK, 0), key)
    return ((a << 32 | b) >> 11) * 2.0**-53
