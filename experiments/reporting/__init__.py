"""What the studies found, a section each, from the rows that they committed; `experiments/report.py` makes the page."""
