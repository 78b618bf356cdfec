"""The command `inferpool`: its verbs, their flags and their output."""
