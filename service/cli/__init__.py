"""The command `inferpool`: its verbs, their flags, and what they print."""
