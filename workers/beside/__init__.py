"""Processes beside the workers: the forkserver, the probe, and the search for a faster preset."""
