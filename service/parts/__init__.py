"""Optional features, each a room that `service/app.py` attaches to the core."""
