"""`python -m fxrecals` is the command `fxrecals`."""

from fxrecals.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
