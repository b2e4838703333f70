"""Checks and benchmarks of ``storm.offload`` on this machine: ``python -m storm.selftest``."""
