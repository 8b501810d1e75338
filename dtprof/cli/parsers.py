"""The parser of a command: every option has an environment variable, and errors say what to type next."""

import argparse
import difflib
import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_URL = re.compile(r"(?!file:|local:)[a-z][a-z0-9+:]+://")

NAMED_APART = {
    ("dashboard", "--host"): "DTPROF_DASHBOARD_HOST",  # DTPROF_HOST names this host in runs
    ("collect", "--output"): "DTPROF_COLLECT_STORE",  # DTPROF_OUTPUT is the run of `run`
    ("runs", "--host"): "DTPROF_RUNS_HOST",
    ("trace", "--steps"): "DTPROF_NOW_STEPS",  # DTPROF_STEPS is the range of `export`
    ("doctor", "--output"): "DTPROF_DOCTOR_OUTPUT",  # DTPROF_OUTPUT is the directory of `run`
    ("plan", "--check"): "DTPROF_PLAN_CHECK",  # DTPROF_CHECK is what `run` checks
}
"""Variables of options whose own name means something else."""


@dataclass(frozen=True, kw_only=True)
class _Unset:
    """Default of an option that was not given; help texts show the real one."""

    default: Any  # of whatever type the option has

    def __str__(self) -> str:
        return str(self.default)


def output_path(text: str) -> Path:
    """Return where to write; the type of an option, which refuses a URL: as a path it would be a folder here."""
    if _URL.match(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL; expected a path of this machine, to be copied from")
    return Path(re.sub(r"^(?:file|local):/+", "/", text))


class GivenOnce(argparse.Action):
    """Takes one value; refuses a second one where both would be expected to count."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Keep the value."""
        before = getattr(namespace, self.dest, None)
        if isinstance(before, str):
            parser.error(f"{option_string} was given as {before} and as {values}; expected one: ask for each by itself")
        setattr(namespace, self.dest, values)


_INVALID_CHOICE = re.compile(r"invalid choice: '([^']+)' \(choose from (.*)\)$")


def _closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that a mistyped one may mean, by their letters: dashes are alike in all options."""
    by_letters = {name.lstrip("-"): name for name in known}
    typed = word.lstrip("-")
    near = difflib.get_close_matches(typed, by_letters, n=1, cutoff=0.7)
    near += [name for name in by_letters if len(typed) >= 4 and typed in name]
    return by_letters[near[0]] if near else ""


def _close_choice(message: str) -> str:
    """Return what a mistyped choice may mean, as a part of argparse's message; empty where that is not known."""
    found = _INVALID_CHOICE.search(message)
    if found is None:
        return ""
    if close := _closest(found[1], re.findall(r"[\w-]+", found[2])):
        return f"; {found[1]} may mean {close}"
    is_command = "argument COMMAND" in message and shutil.which(found[1]) is not None
    return f"; to record {found[1]}: dtprof run -- {found[1]}" if is_command else ""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the paragraphs of descriptions and epilogs; indented lines, such as examples, stay as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        joined = re.sub(r"(?m)^(\S.*)\n(?=\S)(?![a-z ]+:)", r"\1 ", text)  # a line such as "exit status: 0" begins anew
        wrapper = textwrap.TextWrapper(width, indent, indent, break_on_hyphens=False, break_long_words=False)
        return "\n".join(wrapper.fill(line) if line[:1].strip() else line for line in joined.splitlines())


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of one command; the environment provides those not given."""

    def __init__(self, **settings: Any) -> None:
        """Make a parser that takes options by their full names only, and prints the epilog line by line."""
        super().__init__(**{**settings, "allow_abbrev": False, "formatter_class": _HelpFormatter})
        self._variables: dict[str, str] = {}  # by option, where the command does not read the variable itself

    def name_variables(self, command: str) -> None:
        """Give every option its variable, and say so in its help; to be called once, when all options are there."""
        for action in self._actions:
            option = _long_option(action)
            if option is None or "[DTPROF_" in (action.help or ""):
                continue  # of dtprof.settings: the command reads it
            variable = NAMED_APART.get((command, option), "DTPROF_" + option[2:].replace("-", "_").upper())
            self._variables[option] = variable
            action.help = f"{action.help} [{variable}{'=1' if action.nargs == 0 else ''}]"

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments, with defaults from the environment."""
        from_variables = {
            action: text for action in self._actions if (text := os.environ.get(self._variable(action), ""))
        }
        before = [(action, action.default, action.required) for action in from_variables]
        for action in from_variables:
            action.required = False
            if action.default is not None:
                action.default = _Unset(default=action.default)
        try:
            parsed, left = super().parse_known_args(args, namespace)
        finally:
            for action, default, required in before:
                action.default, action.required = default, required
        self._fill(parsed, from_variables)
        return parsed, left

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, the usage, and the command that helps."""
        super().error(f"{message}{_close_choice(message)}; see {self.prog} --help")

    def refuse(self, left: Sequence[str]) -> NoReturn:
        """End as `error` does, over arguments that the command does not know."""
        known = [option for action in self._actions for option in action.option_strings]
        meant = {
            word: close
            for word in (text.partition("=")[0] for text in left if text.startswith("-"))
            if (close := _closest(word, known))
        }
        hint = "".join(f"; {word} may mean {option}" for word, option in meant.items())
        self.error(f"unrecognized arguments: {' '.join(left)}{hint}")

    def _variable(self, action: argparse.Action) -> str:
        return self._variables.get(_long_option(action) or "", "")

    def _fill(self, parsed: argparse.Namespace, from_variables: dict[argparse.Action, str]) -> None:
        values = {action: getattr(parsed, action.dest) for action in self._actions if _long_option(action)}
        left_open = [
            action for action in from_variables if values[action] is None or isinstance(values[action], _Unset)
        ]
        chosen = {action for action, value in values.items() if value is True}
        parsed.from_environment = dict(getattr(parsed, "from_environment", {}))  # of the command's own parser
        for action in left_open:
            setattr(parsed, action.dest, action.default)
        for action in left_open:
            rivals = self._rivals(action)
            if chosen & rivals or (action.nargs == 0 and from_variables[action] == "0"):
                continue  # the command line wins
            for rival in rivals.intersection(left_open):
                names = [
                    f"{self._variable(option_action)} is {from_variables[option_action]!r}"
                    for option_action in (rival, action)
                ]
                if from_variables[rival] != "0":
                    self.error(f"{' and '.join(names)}; expected one of them")
            option, variable = _long_option(action) or "", self._variable(action)
            setattr(parsed, action.dest, self._convert(action, f"{option} (from {variable})", from_variables[action]))
            parsed.from_environment[option] = variable

    def _rivals(self, action: argparse.Action) -> set[argparse.Action]:
        groups = (group._group_actions for group in self._mutually_exclusive_groups)
        return {rival for members in groups if action in members for rival in members if rival is not action}

    def _convert(self, action: argparse.Action, shown: str, text: str) -> Any:
        if action.nargs == 0:
            return True
        values = text.split(",") if isinstance(action, argparse._AppendAction) else [text]
        if action.choices is not None and text not in action.choices:
            self.error(f"{shown} is {text!r}; expected one of {', '.join(map(str, action.choices))}")
        try:
            converted = [action.type(value) if callable(action.type) else value for value in values]
        except (argparse.ArgumentTypeError, ValueError) as error:
            self.error(f"{shown} is {text!r}: {error}")
        return converted if isinstance(action, argparse._AppendAction) else converted[0]


def _long_option(action: argparse.Action) -> str | None:
    longs = [option for option in action.option_strings if option.startswith("--")]
    return longs[0] if longs and not isinstance(action, argparse._HelpAction | argparse._VersionAction) else None
