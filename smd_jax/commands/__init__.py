"""The commands: smd-train, smd-eval, smd-export and smd-plot. They need the extra `train`, and nothing needs them.

smd-train grpo --model DIR --dataset NAME      arguments ─► prepare ─► smd_jax.runs.run.train
"""
