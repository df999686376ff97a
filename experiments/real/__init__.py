"""The study on a real model: its task, its jobs, and one run. `experiments/real_model.py` lists the runs."""
