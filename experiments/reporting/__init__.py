"""Sections of REPORT.md and of its appendix, each made from the committed rows of a study."""
