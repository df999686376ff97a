"""Faults that experiments/faults.py does to runs, by what they hit.

runs       the runs that are broken, and what they leave behind
processes  killed, told to stop, one of two killed
disks      files damaged, torn, or with no room to grow
refusals   what must not go on: refused, and the directory left as it was
steps      what happens inside of a step: losses that are not finite, a wrong mask, a broken logger
"""
