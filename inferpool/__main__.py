"""The command `inferpool`, and `python -m inferpool`.

Workers import this module when they start, so it imports nothing until `main` runs.
"""


def main() -> int:
    """Run the command line of this process; return its exit status."""
    try:
        from inferpool.service.signals import SHELL_OFFSET, early_signal, end_early

        end_early()  # before the slow imports
        try:
            from inferpool.service.cli.main import run

            return run()
        except Exception:  # an import may have turned the signal's exception into another one
            if signum := early_signal():
                return SHELL_OFFSET + signum
            raise
    except ModuleNotFoundError as error:
        if error.name != "inferpool.service":
            raise
        raise SystemExit(
            "inferpool/service is missing. In a checkout it is a symbolic link, and some tools "
            "write a text file instead: clone again with `git clone -c core.symlinks=true`"
        ) from error
    except KeyboardInterrupt:  # during the imports; later, `run` handles it
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
