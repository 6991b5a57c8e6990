"""`python -m lightning_mp` is `lightning-mp`."""

from lightning_mp.cli import main

main()
