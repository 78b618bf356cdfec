"""Check of a loaded model on an instance of its own, before its worker is ready."""
