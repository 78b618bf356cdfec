"""A folder of models that are served as they come and go."""
