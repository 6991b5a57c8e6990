"""`python -m lightning_mp` runs the command `lightning-mp`."""

from lightning_mp.cli import main

main()
