"""`inferpool doctor`: finds problems of this machine and these settings, and says what to do.

It makes the checks of `service.checks`, which every start makes, and slower ones of its own.
"""
