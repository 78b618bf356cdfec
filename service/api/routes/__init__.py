"""The routes beside `/predict`."""
