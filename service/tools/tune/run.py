"""A run of `inferpool tune`: measure the user's settings, vary them, report, write the file."""

import asyncio
import contextlib
import io
import json
import signal
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime

import uvloop

from inferpool.service.settings.loader import LoadedSettings, Row, write_toml
from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.report import write_page
from inferpool.service.tools.trial.screen import Interruption, Screen
from inferpool.service.tools.tune.candidates import ServiceStarter
from inferpool.service.tools.tune.knobs import Changes, KnobFacts, key_of, knobs_for
from inferpool.service.tools.tune.plan import TunePlan
from inferpool.service.tools.tune.report import TuneReport, figure
from inferpool.service.tools.tune.search import BestLostError, Search
from inferpool.workers.host.devices import find_host

EXIT_TUNED = 0
EXIT_UNWRITTEN = 1
"""The settings were found, and the file could not be written."""
EXIT_UNMEASURED = 3
"""No service started, it had no input, or it stopped answering."""
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as in shells."""
_TICK_S = 0.2


def run(loaded: LoadedSettings, whole: LoadedSettings, plan: TunePlan) -> int:
    """Tune the one model of some settings; returns the exit status.

    `whole` has the user's file with all of its models, since all of them are written.
    """
    try:
        report = uvloop.run(_TuneRun(loaded, plan).run())
    except KeyboardInterrupt:
        sys.stderr.write("inferpool tune: ended at once, without a report\n")
        return EXIT_INTERRUPTED
    if report.outcome.best is None:
        reason = report.failure or "interrupted before anything was measured"
        sys.stderr.write(f"inferpool tune: {reason}\n")
        return EXIT_INTERRUPTED if report.is_interrupted else EXIT_UNMEASURED
    text = settings_text(loaded, whole, report.best.changes, report.comments())
    is_whole = not (report.is_interrupted or report.failure)
    # First: a result of minutes must not be lost if the reader of our output is gone.
    unwritten = _write_files(plan, report, text, has_settings=is_whole)
    people = sys.stderr if plan.json else sys.stdout
    report.write(people)
    if plan.json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=1) + "\n")
    if plan.file is None or unwritten or not is_whole:
        people.write(f"\n{text}")
    else:
        people.write(f"Written to {plan.file}.\n")
    if unwritten:
        sys.stderr.write(f"inferpool tune: {unwritten}\n")
        return EXIT_UNWRITTEN
    if report.failure:
        return EXIT_UNMEASURED
    return EXIT_INTERRUPTED if report.is_interrupted else EXIT_TUNED


def _write_files(plan: TunePlan, report: TuneReport, text: str, *, has_settings: bool) -> str:
    """Write the files; return why one cannot be written, or nothing."""
    try:
        if plan.html is not None:
            write_page(plan.html, f"inferpool tune: {report.model}", report.date, report.page(text))
        if plan.file is not None and has_settings:
            plan.file.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"{error.filename or 'a file'}: {error.strerror}"
    return ""


class _TuneRun:
    def __init__(self, loaded: LoadedSettings, plan: TunePlan) -> None:
        (self._model,) = loaded.settings.models
        self._loaded = loaded
        self._plan = plan
        self._starter = ServiceStarter(loaded, self._model, plan)
        self._began = time.monotonic()

    async def run(self) -> TuneReport:
        """Tune the model; a failure or an interruption ends the report early."""
        task = asyncio.current_task()
        assert task is not None
        interruption = Interruption(
            signal.SIGINT, signal.SIGTERM, signal.SIGHUP, on_first=task.cancel
        )
        failure = ""
        settings = self._loaded.settings
        with Screen(sys.stderr) as screen:
            search = Search(self._starter, self._plan.goal, self._plan.budget, screen.begin)
            showing = asyncio.create_task(self._show(search, screen))
            try:
                await search.begin()
                facts = KnobFacts(
                    settings=settings,
                    model=self._model,
                    host=find_host(settings.cuda_visible_devices, settings.cuda_device_order),
                    goal=self._plan.goal,
                    preset=self._starter.preset,
                    decode=self._starter.decode,
                    num_fronts=self._starter.num_fronts,
                    num_decoders=self._starter.num_decoders,
                )
                await search.run(knobs_for(facts, self._fixed()))
            except (TrialError, BestLostError) as error:
                failure = str(error)
            except asyncio.CancelledError:
                if not interruption.has_come:
                    raise
            finally:
                await search.close()
                showing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await showing
        return TuneReport(
            model=self._model,
            source=settings.models[self._model].source,
            preset=self._starter.preset,
            goal=self._plan.goal,
            outcome=search.outcome,
            seconds=time.monotonic() - self._began,
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            is_interrupted=interruption.has_come,
            failure=failure,
        )

    def _fixed(self) -> frozenset[str]:
        """Return the settings that flags or the environment set for this run."""
        return frozenset(
            key[-1]
            for key, _, origin in self._loaded.rows()
            if origin.startswith(("flag", "environment"))
        )

    async def _show(self, search: Search, screen: Screen) -> None:
        while True:
            share = (time.monotonic() - self._began) / self._plan.budget
            outcome, figures = search.outcome, "nothing measured yet"
            if outcome.best is not None:
                sample = outcome.best.sample
                figures = (
                    f"best of {len(outcome.tried)}: {figure(sample.rate)}/s, "
                    f"p99 {figure(sample.percentile_s(99) * 1e3)} ms, {outcome.best.gain:.2f} x"
                )
            screen.show(share, figures)
            await asyncio.sleep(_TICK_S)


def settings_text(
    loaded: LoadedSettings, whole: LoadedSettings, changes: Changes, comments: Iterable[str]
) -> str:
    """Return the text of the file.

    `loaded` has the settings of the tuned model; `whole` has the user's file, with all of its
    models.
    """
    (model,) = loaded.settings.models
    values = {key_of(name, model): value for name, value in changes.items()}
    rows: list[Row] = []
    for key, value, origin in _merged(loaded, whole, model):
        if key in values:
            rows.append((key, values[key], "tuned"))
        elif _is_said(key, origin):
            rows.append((key, value, "default"))  # it leaves no comment in the file
    file = io.StringIO()
    file.writelines(f"# {line}\n" for line in comments)
    if len(rows[0][0]) == 1:  # a table begins with an empty line of its own
        file.write("\n")
    write_toml(rows, file)
    return file.getvalue()


def _merged(loaded: LoadedSettings, whole: LoadedSettings, model: str) -> list[Row]:
    """Return the rows of the user's file, with the tuned ones of the model."""
    if not any(origin.startswith("file") for origin in whole.origins.values()):
        return loaded.rows()
    own = [row for row in loaded.rows() if row[0][:2] == ("models", model)]
    others = [row for row in whole.rows() if row[0][:2] != ("models", model)]
    return [*others, *own]


def _is_said(key: tuple[str, ...], origin: str) -> bool:
    if key[0] == "models" and key[2] == "source":
        return True
    return origin != "default" and (key[0] == "models" or not origin.startswith("environment"))
