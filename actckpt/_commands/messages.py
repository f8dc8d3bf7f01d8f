"""Messages of commands on standard error."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

from actckpt._text.suggestions import did_you_mean

__all__ = [
    "EXIT_USAGE",
    "as_options",
    "check_unit",
    "explained_choice",
    "none_fits",
    "not_read",
    "number",
    "reason",
    "slow",
    "unexpected",
    "whole_number",
]

EXIT_USAGE = 2
_QUIET_SECONDS = 2.0


@contextlib.contextmanager
def slow(who: str, what: str) -> Iterator[Callable[[str], None]]:
    """Print the current work if it takes longer than two seconds, and every two seconds if it has changed.

    Yields a function to set the current work.
    """
    under_way, ended = [what], threading.Event()

    def tell() -> None:
        printed = None
        while not ended.wait(_QUIET_SECONDS):
            if printed != under_way[0]:
                printed = under_way[0]
                print(f"{who}: {printed} ...", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield lambda now: under_way.__setitem__(0, now)
    finally:
        ended.set()
        teller.join()


def check_unit(budget: str) -> None:
    """Raise if a budget is a plain number, or a share.

    Raises:
        ValueError: it is one; says what to pass.
    """
    text = budget.strip()
    if text[-1:].isdigit():
        raise ValueError(f"--budget {budget} has no unit. Pass a size like {text}GiB.")
    if text.endswith("%"):
        raise ValueError(
            f"--budget {budget} is a share, and here nothing is known that it could be one of. Pass 24GiB."
        )


def reason(error: Exception) -> str:
    """Return the text of an error; for a file error, which file, and why."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def as_options(text: str) -> str:
    """Return an error's text about budgets with options instead of keywords."""
    return re.sub(
        r"(?<![\w-])(activation_)?budget=", lambda match: f"--{(match[1] or '').replace('_', '-')}budget ", text
    )


def none_fits(args: argparse.Namespace, error: Exception) -> int:
    """Print that no plan fits, and which budget would suffice; return the exit status."""
    option = "--activation-budget" if getattr(args, "budget", None) is None else "--budget"
    smallest_bytes: float | None = getattr(error, "smallest_bytes", None)
    least = "" if smallest_bytes is None else f" Try {option} {math.ceil(smallest_bytes / 2**10)}KiB."
    print(f"{args.parser.prog}: {as_options(str(error))}{least}", file=sys.stderr)
    return EXIT_USAGE


def not_read(words: Iterable[str], known: Iterable[str]) -> str:
    """Return which words of the command line are unknown, and which options may have been meant."""
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not options:
        return f"unexpected {' '.join(words)}: it stands for no option and no argument"
    known = [option for option in dict.fromkeys(known) if option.startswith("--")]
    ends = {word: [option for option in known if option.endswith(word.lstrip("-"))] for word in options}
    meant = [ends[word][0] if word.startswith("--") and len(ends[word]) == 1 else word for word in options]
    return f"unknown option {', '.join(options)}.{did_you_mean(meant, known)}"


def explained_choice(message: str) -> str:
    """Add the nearest choice to argparse's text about an unknown one."""
    match = re.search(r"invalid choice: '?([^'\s]+)'? \(choose from (.*)\)", message)
    if match is None:
        return message
    return message + did_you_mean([match[1]], re.findall(r"[\w-]+", match[2]))


def unexpected(error: BaseException, path: str) -> str | None:
    """Return where a script raised an error, and what; None if the script was not running."""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == path:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    if isinstance(error, SyntaxError):
        path, line = error.filename or path, error.lineno
    return None if line is None else f"{path}:{line}: {type(error).__name__}: {error}"


def whole_number(text: str) -> int:
    """Read an argument that is a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number.") from None


def number(text: str) -> float:
    """Read an argument that is a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number.") from None
