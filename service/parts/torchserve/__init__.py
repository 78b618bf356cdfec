"""The paths, addresses and management of TorchServe."""
