"""The command `omniload`; `cli.py` is its entry."""
