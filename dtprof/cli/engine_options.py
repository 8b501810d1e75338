"""The options of analysing commands that choose where the analysis runs."""

import argparse
from dataclasses import replace

from dtprof import settings
from dtprof.session.engines import Engine, make_engine


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command."""
    group = parser.add_argument_group("where the analysis runs")
    for setting in settings.ANALYSIS_SETTINGS:
        group.add_argument(setting.option, metavar=setting.metavar, help=f"{setting.help} [{setting.env}]")


def chosen_engine(arguments: argparse.Namespace) -> Engine:
    """Return the executor options, with defaults from the environment.

    Raises:
        UsageError: there is no such engine, or they contradict each other.
    """
    given = {setting: getattr(arguments, setting.option.removeprefix("--")) for setting in settings.ANALYSIS_SETTINGS}
    name, scheduler, jobs = (
        settings.from_environment(setting) if given[setting] is None else given[setting]
        for setting in settings.ANALYSIS_SETTINGS
    )
    if name == "dask" and scheduler and given[settings.JOBS] is None:
        jobs = ""  # what the environment says is for this host
    engine = make_engine(name, scheduler=scheduler, jobs=jobs, asked_for=given[settings.SCHEDULER] is not None)
    return replace(engine, owns_process=True)
