"""The command `inferpool`, and `python -m inferpool`.

Workers import this module again when they start, so nothing is imported until `main` runs.
"""


def main() -> int:
    """Run the command line of this process; returns its exit status."""
    try:
        from inferpool.service.signals import SHELL_OFFSET, early_signal, end_early

        end_early()  # before anything that takes long to import
        try:
            from inferpool.service.cli.main import run

            return run()
        except Exception:  # an import may have made another exception of the signal's
            if signum := early_signal():
                return SHELL_OFFSET + signum
            raise
    except ModuleNotFoundError as error:
        if error.name != "inferpool.service":
            raise
        raise SystemExit(
            "inferpool/service is missing. In a checkout it is a symbolic link, for which some "
            "tools write a text file: clone again with `git clone -c core.symlinks=true`"
        ) from error
    except KeyboardInterrupt:  # while those are imported; afterwards `run` knows what to do
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
