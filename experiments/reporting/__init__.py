"""Sections of REPORT.md and of its appendix, made from the committed rows of the studies that have a plan."""
