"""`python -m omniload` is the command `omniload`."""

from omniload.tools.cli import main

if __name__ == "__main__":
    main()
