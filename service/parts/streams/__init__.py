"""Answers that come in parts: how clients get each as it comes."""
