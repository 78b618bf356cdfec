"""Routes other than `/predict`."""
