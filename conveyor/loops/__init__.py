"""Loops that join sampling to training: rounds of sample → score → select → fit."""
