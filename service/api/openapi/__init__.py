"""The OpenAPI document: what FastAPI cannot know of its own routes, and all of `/predict`."""
