"""Measurements: kernels against the machine's limits, whole workloads, and the clients that drive them."""
