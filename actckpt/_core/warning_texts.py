"""Texts of warnings. docs/errors.md lists every one that the package creates."""

from __future__ import annotations

from typing import ClassVar

from actckpt._error_base import ActckptWarning

__all__ = ["WarningText"]


class WarningText:
    """The text of a warning, or of a logged message.

    Args:
        happened: what happened and why; fields in braces are filled in when it is shown.
        advice: what to do about it; may have fields, too.
        per: the cause for which it is shown once, such as "model"; empty: each call shows it.
        category: of the warning.
    """

    #: All texts of the modules that are imported.
    all: ClassVar[list[WarningText]] = []

    def __init__(
        self, happened: str, advice: str, *, per: str = "", category: type[ActckptWarning] = ActckptWarning
    ) -> None:
        self.happened, self.advice, self.per, self.category = happened, advice, per, category
        self.all.append(self)

    def message(self, **values: object) -> str:
        """Return the text with its fields filled in."""
        shown = f" Shown once per {self.per}." if self.per else ""
        return f"{self.happened} {self.advice}".format(**values) + shown
