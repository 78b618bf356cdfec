"""What on this machine, or in this configuration, would go wrong, and what to do about it.

`facts` looks, once; each check takes what was found and yields findings; `report` writes them. The
quick checks cost milliseconds and no process, and the service makes them at every start; the
others are made by `inferpool doctor` alone.
"""
