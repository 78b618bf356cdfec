"""Keeps what handlers of archives change in a process to one test."""

import sys

import pytest


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """Restore where Python finds modules: a handler adds TorchServe's, and its own folder."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
