"""What on this machine, or in this configuration, would go wrong, and what to do about it.

It makes the checks of `service.checks`, which the service makes at every start, and slower ones of
its own; `report` writes what they find.
"""
