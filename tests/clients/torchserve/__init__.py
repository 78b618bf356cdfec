"""TorchServe's side of the real clients: archives, the real server, and its recorded answers."""
