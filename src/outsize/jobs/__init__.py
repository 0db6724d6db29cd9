"""Whole jobs: train under a plan, compare strategies, the default job."""
