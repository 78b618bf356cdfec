"""Texts of what a model raises and logs, cut before anything is made of them. Any process.

A model's code may raise an error whose text has 500 MB, or whose `__str__` raises another. Nothing
here raises, and of a long text no copy is made.
"""

import traceback

MAX_MESSAGE_CHARS = 500
_MAX_NAME_CHARS = 100
_MAX_TRACE_CHARS = 20_000
_MAX_FRAMES = 100
_MAX_CHAIN = 10
_LONG = str | bytes | bytearray
_OWN_TEXT = (BaseException.__str__, KeyError.__str__)
"""These make the text of an exception from its arguments alone."""


def printable(text: str) -> str:
    """A text that can be encoded, whatever a path or a model put into it."""
    return text.encode("utf-8", "backslashreplace").decode()


def text_of(error: BaseException, most: int = MAX_MESSAGE_CHARS) -> str:
    """What an exception says, cut to so many characters."""
    try:
        long = [arg for arg in error.args if isinstance(arg, _LONG) and len(arg) > most]
        if long and type(error).__str__ in _OWN_TEXT:
            first = long[0][:most]
            text = first if isinstance(first, str) else repr(bytes(first))
        else:
            text = str(error)
        return printable(text[:most])[:most]
    except Exception as failure:
        return f"(its text cannot be had: {name_of(failure)})"


def name_of(error: BaseException) -> str:
    """The name of an exception's type."""
    return printable(type(error).__name__[:_MAX_NAME_CHARS])


def described(error: BaseException, most: int = MAX_MESSAGE_CHARS) -> str:
    """An exception as its type and what it says."""
    return f"{name_of(error)}: {text_of(error, most)}"[:most]


def traceback_of(error: BaseException) -> str:
    """An exception with its traceback, as Python prints it where its texts are not too long."""
    try:
        chain = chain_of(error)
        if all(_is_short(each) for each in chain):
            text = "".join(traceback.format_exception(error))
        else:
            parts = []
            for each in reversed(chain):
                frames = traceback.format_tb(each.__traceback__, -_MAX_FRAMES)
                parts.append("".join([*frames, described(each)]))
            text = "\n\n".join(parts)
        return printable(text[-_MAX_TRACE_CHARS:].rstrip())
    except Exception:
        return described(error)


def chain_of(error: BaseException) -> list[BaseException]:
    """An exception, and what it came of, and what it holds if it is a group."""
    chain: list[BaseException] = []
    waiting = [error]
    while waiting and len(chain) < _MAX_CHAIN:
        each = waiting.pop(0)
        if any(each is other for other in chain):
            continue
        chain.append(each)
        held = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        causes = (each.__cause__, each.__context__)
        waiting += [other for other in (*held, *causes) if isinstance(other, BaseException)]
    return chain


def _is_short(error: BaseException) -> bool:
    """Whether Python may print all that an exception says."""
    try:
        if any(isinstance(arg, _LONG) and len(arg) > _MAX_TRACE_CHARS for arg in error.args):
            return False
        notes = getattr(error, "__notes__", ())
        return sum(map(len, notes)) + len(str(error)) <= _MAX_TRACE_CHARS
    except Exception:
        return False
