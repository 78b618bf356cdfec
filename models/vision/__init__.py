"""Image classifiers: decoding, transforms, networks, and labels."""
