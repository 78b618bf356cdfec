"""Says what is being done to which model: restarts and changes of one model exclude each other.

Lives in the main process's event loop.
"""

from inferpool.service.errors import ConflictError


class Claims:
    """The models that are being changed or restarted, each by one at a time."""

    def __init__(self) -> None:
        """Begin with no model claimed."""
        self._what: dict[str, str] = {}

    def __contains__(self, model: str) -> bool:
        """Return whether something is being done to a model."""
        return model in self._what

    def take(self, model: str, what: str) -> None:
        """Claim a model until `give_back`; `what` says what is done to it, as a sentence.

        Raises:
            ConflictError: Something else is being done to it.
        """
        if model in self._what:
            raise ConflictError(f"{model} is busy: {self._what[model]}", retry_after_s=1)
        self._what[model] = what

    def give_back(self, model: str) -> None:
        """End the claim to a model."""
        self._what.pop(model, None)
