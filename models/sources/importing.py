"""Says whether code runs because a worker imports it for the model in it. No torch.

A script may define a model and serve it, without a guard around the serving. The workers of that
service import the script too. Its import ends where it would start a service of its own: by then it
has defined the model.
"""

import importlib
import sys
from contextvars import ContextVar
from types import ModuleType

_imported: ContextVar[str] = ContextVar("imported", default="")
"""The module that is imported for a model; empty where none is."""


class HasDefinedModelError(BaseException):
    """Ends the import of a script that would serve; no `Exception`, which the script may catch."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(f"{module.__name__} is imported for a model in it")
        self.module = module
        """As far as it has run."""


def import_for_model(name: str) -> ModuleType:
    """Import a module; if it is a script that serves its model, only up to there.

    Raises:
        Exception: What the code of the module raises.
    """
    token = _imported.set(name)
    try:
        return importlib.import_module(name)
    except HasDefinedModelError as reached:
        sys.modules[name] = reached.module  # a failed import has removed it
        return reached.module
    finally:
        _imported.reset(token)


def end_import_for_model() -> None:
    """End the import that this code runs for, if there is one.

    Raises:
        HasDefinedModelError: There is one.
    """
    if name := _imported.get():
        raise HasDefinedModelError(sys.modules[name])
