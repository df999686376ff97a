"""The study on a real model: its task, and a run. `experiments/real_model.py` says which runs there are."""
