"""Memory of rollouts, updates and evaluations on each device, as XLA reports it, and sizes that fit a device."""

from smd_jax.byte_sizes import parse_bytes as parse_bytes
from smd_jax.memory.compiled import LoopMemory as LoopMemory
from smd_jax.memory.compiled import SegmentMemory as SegmentMemory
from smd_jax.memory.compiled import loop_memory as loop_memory
from smd_jax.memory.compiled import param_shapes as param_shapes
from smd_jax.memory.compiled import program_bytes as program_bytes
from smd_jax.memory.compiled import segment_memory as segment_memory
from smd_jax.memory.compiled import tree_bytes as tree_bytes
from smd_jax.memory.fit import fit_evaluator as fit_evaluator
from smd_jax.memory.fit import fit_loop as fit_loop
