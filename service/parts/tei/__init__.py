"""The paths of Text Embeddings Inference (TEI), a server of Hugging Face."""
