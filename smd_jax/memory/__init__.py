"""Memory plans: the bytes that rollouts and updates will hold on each device, known before they run."""

from smd_jax.memory.compiled import LoopMemory as LoopMemory
from smd_jax.memory.compiled import SegmentMemory as SegmentMemory
from smd_jax.memory.compiled import loop_memory as loop_memory
from smd_jax.memory.compiled import segment_memory as segment_memory
from smd_jax.memory.plan import MemoryPlan as MemoryPlan
from smd_jax.memory.plan import Workload as Workload
from smd_jax.memory.plan import check_memory as check_memory
from smd_jax.memory.plan import device_memory as device_memory
from smd_jax.memory.fit import fit_evaluator as fit_evaluator
from smd_jax.memory.fit import fit_loop as fit_loop
from smd_jax.memory.fit import fit_decode_rows as fit_decode_rows
from smd_jax.byte_sizes import parse_bytes as parse_bytes
from smd_jax.memory.plan import plan_memory as plan_memory
from smd_jax.memory.fit import usable_memory as usable_memory
