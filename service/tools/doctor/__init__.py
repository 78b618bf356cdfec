"""`inferpool doctor`: finds problems of this machine and these settings, and says what to do.

It makes the checks that every start makes (`service.checks`), and slower ones of its own.
"""
