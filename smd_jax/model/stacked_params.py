"""Parameters of a model with one entry per layer, or with equal layers stacked.

    layers_0/mlp/up_proj/kernel [in, out], layers_1/… up to layers_29      the form of checkpoints and adapters on disk
    layers_0_to_29/mlp/up_proj/kernel [30, in, out]                        a loop over layers reads it without a copy

A Decoder takes either form, with the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from smd_jax.model.layer_runs import layers_in_name, run_name, structure
from smd_jax.model.lora import LORA
from smd_jax.model.stored_tensors import some
from smd_jax.pytrees import stack, unstack


def _runs_in(tree: Mapping[str, Any]) -> dict[range, str]:
    """The stacked runs of a tree, and their keys."""
    names = ((layers_in_name(name), name) for name in tree)
    return {layers: name for layers, name in names if layers is not None}


def check_names(params: Mapping[str, Any], layers: int, tied: bool) -> None:
    """Raises ValueError for parameters that a model of `layers` layers would not read. Flax raises for missing ones.

    Args:
      tied: whether the embeddings are the output layer, so that there is no lm_head.
    """
    read = {f"layers_{index}" for index in range(layers)}
    read |= {name for run, name in _runs_in(params).items() if run.stop <= layers}
    unread = [name for name in params if name.startswith("layers_") and name not in read]
    if tied and "lm_head" in params:
        unread.append("lm_head")
    if unread:
        head = "tied embeddings" if tied else "an lm_head"
        raise ValueError(
            f"expected parameters of {layers} layers with {head}, as the config says; got {some(unread)}, too"
        )


def layer_of(variables: Mapping[str, Mapping[str, Any]], index: int) -> dict[str, Any]:
    """The variables of one layer, by collection; views of parameters in either form."""
    found = {}
    for collection, tree in variables.items():
        if f"layers_{index}" in tree:
            found[collection] = tree[f"layers_{index}"]
        for layers, name in _runs_in(tree).items():
            if index in layers:
                place = index - layers.start
                found[collection] = jax.tree.map(lambda x, place=place: x[place], tree[name])
    return found


def layers_of(variables: Mapping[str, Mapping[str, Any]], layers: range) -> dict[str, Any] | None:
    """The variables of a run, by collection, stacked; None if its layers differ, such as by their adapters."""
    found = {}
    for collection, tree in variables.items():
        run = tree.get(run_name(layers))
        if run is None:
            parts = [layer_of({collection: tree}, index).get(collection) for index in layers]
            if len({structure(part) for part in parts}) > 1:
                return None
            if parts[0] is None:
                continue
            run = stack(parts)
        found[collection] = run
    return found


def stack_params(params: Mapping[str, Any], runs: Sequence[range]) -> dict[str, Any]:
    """Parameters of a Decoder with each run of layers stacked under a key such as `layers_0_to_29`, adapters included.

    Runs whose layers differ, and stacked ones, are unchanged.
    """
    new = dict(params)
    for layers in runs:
        names = [f"layers_{index}" for index in layers]
        if len(layers) == 1 or not all(name in new for name in names):
            continue
        if len({structure(new[name]) for name in names}) == 1:
            new[run_name(layers)] = stack([new.pop(name) for name in names])
    if LORA in new:
        new[LORA] = new[LORA].replace(matrices=stack_params(new[LORA].matrices, runs))
    return new


def unstack_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `stack_params`: one entry per layer, the form of checkpoints."""
    new = dict(params)
    for layers, name in _runs_in(params).items():
        parts = unstack(new.pop(name), len(layers))
        new |= {f"layers_{index}": part for index, part in zip(layers, parts, strict=True)}
    if LORA in new:
        new[LORA] = new[LORA].replace(matrices=unstack_params(new[LORA].matrices))
    return new
