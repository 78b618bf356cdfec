"""Ends the import of a user's script where it would start a service of its own. No torch.

A script may define a model and serve it without a `__main__` guard, and the service's workers
import it too. Their import ends where the script would start a service: by then it has defined the
model. Code in another thread cannot end the import, so it gets an error instead.
"""

import importlib
import sys
import threading
from multiprocessing import parent_process
from types import ModuleType

from inferpool.models.errors import PassesThrough, SourceError

_under_way: dict[threading.Thread, tuple[str, str]] = {}
"""Imports under way by thread: the module, and the class that is wanted."""
_imported: set[str] = set()
"""Modules that this worker process has begun to import for a model."""


class HasDefinedModelError(PassesThrough):
    """Ends the import of a script. No `Exception`, since the script may catch those."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(f"{module.__name__} is imported for a model in it")
        self.module = module


def import_for_model(name: str, wanted: str) -> ModuleType:
    """Import a module; if it is a script that serves its model, only up to there.

    Args:
        name: Name of the module.
        wanted: Class in it.

    Raises:
        Exception: Raised by the module's code.
    """
    thread = threading.current_thread()
    before = _under_way.get(thread)
    _under_way[thread] = name, wanted
    if parent_process() is not None:  # a worker: a thread of the script may outlast the import
        _imported.add(name)
    try:
        return importlib.import_module(name)
    except HasDefinedModelError as reached:
        sys.modules[name] = reached.module  # a failed import has removed it
        return reached.module
    finally:
        del _under_way[thread]
        if before is not None:
            _under_way[thread] = before


def end_import_for_model(*, starts: bool = True) -> None:
    """End the import for a model that runs this code, if there is one.

    Args:
        starts: Whether the caller is about to start a service. If not, code before the wanted class
            goes on.

    Raises:
        HasDefinedModelError: This thread imports for a model, and has defined it.
        SourceError: This thread has not defined the model yet, or another thread imports.
    """
    if under_way := _under_way.get(threading.current_thread()):
        name, wanted = under_way
        module = sys.modules.get(name)
        if module is not None and hasattr(module, wanted.partition(".")[0]):
            raise HasDefinedModelError(module)
        if starts:
            raise SourceError(_unguarded(name))
    elif of_main := _under_way.get(threading.main_thread()):
        raise SourceError(_unguarded(of_main[0]))
    elif _imported:
        raise SourceError(_unguarded(", ".join(sorted(_imported))))


def _unguarded(name: str) -> str:
    return (
        f"worker processes import {name} for its model, and must not start a service then: put "
        'what starts it under `if __name__ == "__main__":`'
    )
