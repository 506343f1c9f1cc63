"""`python -m gpmil`: the command line, where the command `gpmil` is not on the path."""

from gpmil.cli import main

if __name__ == "__main__":
    main()
