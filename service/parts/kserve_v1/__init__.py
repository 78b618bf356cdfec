"""Version 1 of KServe's protocol, which TensorFlow Serving speaks too."""
