"""What keeps the calls of a connection in line: the next is read and begun when its turn comes."""

import asyncio
from collections.abc import Sized

from uvicorn.protocols.http.flow_control import FlowControl


class Flow(FlowControl):
    """Does not read on while calls wait in line, though uvicorn does for each call of its own.

    What came then would be the body of one that nobody has looked at: as much as is sent.
    """

    def __init__(self, transport: asyncio.Transport, line: Sized) -> None:
        """Watch a connection.

        Args:
            transport: Of the connection.
            line: The calls that wait for their turn.
        """
        super().__init__(transport)
        self._line = line

    def resume_reading(self) -> None:
        """Read on, unless a call waits."""
        if not self._line:
            super().resume_reading()


class UnreadAnswer:
    """Stands for an answer that is given and not read: what comes behind it waits for its turn."""

    response_complete = False


UNREAD = UnreadAnswer()
