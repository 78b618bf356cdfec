"""The command of the client: its verbs are also verbs of `inferpool`."""
