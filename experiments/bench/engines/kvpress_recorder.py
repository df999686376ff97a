"""Which keys a press of kvpress left in a cache, seen from outside: two hooks around the press's own.

    attention ─► hook before: holds on to the keys ─► the press ─► hook behind: which of them are left?

A press takes keys away and puts them in another order, but doesn't change them. So a key that is left is found by its
numbers, for every press. Two equal keys in one cache, or an unknown key, raise an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from kvpress import BasePress
from transformers import PreTrainedModel

Kept = list[list[list[int]]]  # positions, [layer][kv_head][…]


class Recorder:
    """Follows the cache of one sequence, without padding.

    Attributes:
      positions: layer -> `[kv_heads, slots]` position of the key in every slot.
      compressions: `(query, kept)`, in the order of time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = [layer.self_attn for layer in model.model.layers]
        self.positions: dict[int, torch.Tensor] = {}
        self.compressions: list[tuple[int, Kept]] = []
        self.held: dict[int, torch.Tensor] = {}
        self.changed = False

    @contextmanager
    def following(self, press: BasePress | None, model: PreTrainedModel) -> Iterator[None]:
        """Under a press; None: under none."""
        with ExitStack() as stack:
            # torch calls hooks in the order in which they came: one set before the press's, one behind.
            for layer in self.layers:
                stack.callback(layer.register_forward_hook(self.before, with_kwargs=True).remove)
            if press is not None:
                stack.enter_context(press(model))
            for layer in self.layers:
                stack.callback(layer.register_forward_hook(self.behind, with_kwargs=True).remove)
            yield

    def before(self, module: Any, _: Any, given: dict[str, Any], __: Any) -> None:
        """Notes the keys that this forward pass wrote."""
        keys = given["past_key_values"].layers[module.layer_idx].keys
        written = given["position_ids"][0]
        there = self.positions.get(module.layer_idx, torch.empty(keys.shape[1], 0, dtype=torch.long))
        # RoPE turned the new keys by these positions. A loop that leaves them to the model would fall back after every
        # compression, because the model counts the keys of the cache. (transformers' `generate` counts by itself.)
        if there.numel() and written[0] <= there.max():
            raise ValueError(f"expected positions above {there.max()}, those of earlier tokens; got {written.tolist()}")
        self.positions[module.layer_idx] = torch.cat([there, written.expand(keys.shape[1], -1)], dim=1)
        self.held[module.layer_idx] = keys

    def behind(self, module: Any, _: Any, given: dict[str, Any], __: Any) -> None:
        """Finds what the press left, and at the last layer notes it for all."""
        index = module.layer_idx
        left = given["past_key_values"].layers[index].keys
        if left is not self.held[index]:
            self.positions[index] = self.positions[index].gather(1, places(self.held[index][0], left[0]))
            self.changed = True
        if index == len(self.layers) - 1 and self.changed:
            kept = [self.positions[layer].sort().values.tolist() for layer in range(len(self.layers))]
            self.compressions.append((int(given["position_ids"][0, -1]), kept))
            self.changed = False


def places(before: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """`[kv_heads, kept]` slot that each key of `left [kv_heads, kept, head_dim]` had in `before`."""
    equal = (left[:, :, None] == before[:, None]).all(-1)  # [kv_heads, kept, slots]
    if not (equal.sum(-1) == 1).all():
        raise ValueError("expected every key that is left to be one of those before, and one alone; got others")
    return equal.int().argmax(-1)
