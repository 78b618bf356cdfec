"""Protocols about texts that name their model in the body: OpenAI's, Cohere's and Jina's."""
