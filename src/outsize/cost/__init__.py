"""Bytes and seconds predicted from a model profile and a cluster."""
