"""Search for the fastest plan that fits."""
