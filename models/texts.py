"""Short texts of errors that a model raises, safe to build and to send. Any process.

A model may raise an error with a text of 500 MB, or with a `__str__` that raises another. Nothing
here raises, and no long text is copied.
"""

import traceback

MAX_MESSAGE_CHARS = 500
_MAX_NAME_CHARS = 100
_MAX_TRACE_CHARS = 20_000
_MAX_FRAMES = 100
_MAX_CHAIN = 10
_LONG = str | bytes | bytearray
_OWN_TEXT = (BaseException.__str__, KeyError.__str__)
"""Methods that make an exception's text from its arguments alone."""


def printable(text: str) -> str:
    """Return the text with what cannot be encoded escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def on_one_line(text: str) -> str:
    """Return the text with what is not printable escaped, such as line breaks.

    Names of files may have line breaks, and codes that terminals execute.
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "replace").decode()
        for each in text
    )


def text_of(error: BaseException, most: int = MAX_MESSAGE_CHARS) -> str:
    """Return an exception's text, cut to a number of characters."""
    try:
        long = [arg for arg in error.args if isinstance(arg, _LONG) and len(arg) > most]
        if long and type(error).__str__ in _OWN_TEXT:
            first = long[0][:most]
            text = first if isinstance(first, str) else repr(bytes(first))
        else:
            text = str(error)
        return printable(text[:most])[:most]
    except Exception as failure:
        return f"(its text cannot be read: {name_of(failure)})"


def name_of(error: BaseException) -> str:
    """Return the name of an exception's type."""
    return printable(type(error).__name__[:_MAX_NAME_CHARS])


def described(error: BaseException, most: int = MAX_MESSAGE_CHARS) -> str:
    """Return an exception's type and text."""
    return f"{name_of(error)}: {text_of(error, most)}"[:most]


def traceback_of(error: BaseException) -> str:
    """Return an exception's traceback as Python prints it, shortened if its texts are too long."""
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
    """Return an exception with its causes, and the members of groups."""
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
    """Return whether Python may print all of an exception's text."""
    try:
        if any(isinstance(arg, _LONG) and len(arg) > _MAX_TRACE_CHARS for arg in error.args):
            return False
        notes = getattr(error, "__notes__", ())
        return sum(map(len, notes)) + len(str(error)) <= _MAX_TRACE_CHARS
    except Exception:
        return False
