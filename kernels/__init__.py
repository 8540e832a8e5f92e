"""Triton kernels and their plain-torch reference. Imports nothing: see `reference.py`."""
