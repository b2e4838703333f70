"""Checks and benchmarks of ``storm.offload`` on the machine at hand: ``python -m storm.selftest``."""
