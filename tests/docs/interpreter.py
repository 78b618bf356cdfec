"""One interpreter for all Python examples of a page: later ones may use what earlier ones defined.

It reads lines of JSON, `{"text": ..., "name": ...}`, and answers each with what the example printed
and, if it raised, the traceback.
"""

import contextlib
import io
import json
import sys
import traceback


def main() -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    answers = sys.stdout
    for line in sys.stdin:
        block = json.loads(line)
        error = ""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                exec(compile(block["text"], block["name"], "exec"), names)
            except BaseException:
                error = traceback.format_exc()
        answers.write(json.dumps({"out": out.getvalue(), "error": error}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
