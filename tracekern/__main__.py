"""`python -m tracekern` is the command `tracekern`."""

from tracekern.cli.main import main

main()
