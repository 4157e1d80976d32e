"""y = x Wᵀ with weights in GGUF blocks and activations in bytes, a scale for each row and group of 32.

Sums within a group are exact integers; groups are added in order in fp32. So bits depend neither on the other
rows nor on threads or instruction sets, but they are not those of fp32 arithmetic: eight bits of each
activation count. Weights are packed with `matmul.pack_blocks(…, int8_activations=True)`, and `matmul.linear`
multiplies them.
"""

from __future__ import annotations

from . import reference

__all__ = ["reference"]
