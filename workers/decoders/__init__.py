"""The ring that decoders fill for their worker, and what is said about it. Both sides know it."""
