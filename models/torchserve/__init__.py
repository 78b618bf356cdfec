"""Archives of TorchServe (.mar), and handlers without TorchServe."""
