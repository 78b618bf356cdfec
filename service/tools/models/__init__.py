"""The command `inferpool models`: adds, removes and swaps the models of a running service."""
