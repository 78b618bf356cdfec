"""The paths that platforms expect of a container: Amazon SageMaker, Vertex AI."""
