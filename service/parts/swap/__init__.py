"""Versions that come and go while the service runs, and how they are judged."""
