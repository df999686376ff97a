"""The commands: smd-train, smd-eval, smd-export, smd-plot and smd-certify. They need the extra `train`.

smd-train grpo --model DIR --dataset NAME      arguments ─► prepare ─► smd_jax.runs.run.train
"""
