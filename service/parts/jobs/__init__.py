"""Jobs: calls that outlive their connection. A store keeps them; the service computes them.

They use what calls leave idle. Nothing here runs in a front: the main process does all of it.
"""
