"""Faults that experiments/faults.py injects into runs.

plain, trained   the runs: of plain arithmetic, and of GRPO
left             the outcome of a fault, and what a run leaves in its directory
processes        processes that are killed or get a signal, one of two killed
disks            files damaged, torn, or without room; runs that must not continue: refused, with an unchanged directory
steps            inside a step: a loss that is not finite, a wrong mask, a broken logger
inputs           hostile configurations, names, data, models and chat templates
rewards          hostile reward functions
surroundings     directory names, file handles, signals, the current folder, the output, the user
"""
