"""Places: the names of values, the same in every process and step.

NOTE [ Places ]

A place is a module, an operator (`aten.mm.default`), its occurrence, and the index of its result: first the returned
ones, then the arguments that it writes to, each from 0. The text is `module::operator#occurrence.result`, with `@call`
after the module in every call but the first.

The module is the one whose call runs the operator. It is named by its qualified name in the outermost running module,
or by its type if it is that one. Wrappers (`_orig_mod`, FSDP, checkpoint wrappers, DDP) are left out. A module with
several names has the first. Where no module runs, it is file and line of the `with` statement, or of the function, that
the region wraps. A rerun, including that of torch's checkpoint, may start further inside than its forward: code that
runs in a backward keeps the names that it had in the forward. If it was called in another module since, the checkpoint
around it raises if other values stay.

Occurrences count per call of the module, over all operators of this name that the region records there. Calls that run
operators count per module name and step. A step is over when a backward reads what it saved, when everything that it
saved is dropped, or when its region raised.

A region around a whole model and regions around its layers (`apply`) give the same places. Several regions in one call
of a module count as several calls: operators between them are not recorded, so they cannot be counted. A plan names
blocks by the order of their calls, and counts module calls anew in each block. So its tables do not depend on which
other calls of a block are recorded.

No part of a place is an address or a Python hash, so it does not depend on PYTHONHASHSEED. Modules elsewhere in the
model, or after this one, do not change it.
"""

import dataclasses
import functools
import re

from actckpt._text.selectors import matches

__all__ = ["Place", "Selector"]

_FORM = "module::namespace.operator.overload#occurrence.result, for example layers.0.mlp::aten.mm.default#0.0"
_CALL = re.compile(r"(?P<name>.*)@(?P<call>\d+)", re.DOTALL)
_COUNTS = re.compile(r"(?P<operator>[^#]*)(?:#(?P<occurrence>\d+)(?:\.(?P<result>\d+))?)?")


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """The place where a value is made: names it in every step and process. See NOTE [ Places ] in
    actckpt/_text/places.py.

    Attributes:
        module: qualified name of the module whose call made it; if no module ran, `file:line` of the region.
        operator: with its overload: `aten.mm.default`.
        occurrence: number of operators of this name that ran before it in this call of the module.
        result: index of the operator's result.
        call: number of earlier calls of the module in this step.

    Example::

        >>> from actckpt import Place
        >>> place = Place.parse("layers.0.mlp@1::aten.mm.default#2.0")
        >>> place.module, place.call, place.operator, place.occurrence, place.result
        ('layers.0.mlp', 1, 'aten.mm.default', 2, 0)
        >>> str(place)
        'layers.0.mlp@1::aten.mm.default#2.0'
    """

    module: str
    operator: str
    occurrence: int = 0
    result: int = 0
    call: int = 0

    def __post_init__(self) -> None:
        if not self.module:
            raise ValueError(f"Place: the module is empty. A place is {_FORM}.")
        if "." not in self.operator or not set(self.operator).isdisjoint(":#@"):
            raise ValueError(f"Place: operator={self.operator!r} is no name of an operator, such as aten.mm.default.")
        for name in ("occurrence", "result", "call"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(f"Place: {name}={count!r} is not a whole number from 0 on.")

    def __str__(self) -> str:
        is_ambiguous = self.call or _CALL.fullmatch(self.module)
        call = f"@{self.call}" if is_ambiguous else ""
        return f"{self.module}{call}::{self.operator}#{self.occurrence}.{self.result}"

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Return the place with a text; the inverse of `str`.

        Raises:
            ValueError: no place has this text; says which part is wrong.
        """
        module, colons, rest = text.rpartition("::")
        if not colons:
            raise ValueError(f"{text!r} is no place: it has no '::'. A place is {_FORM}.")
        counts = _COUNTS.fullmatch(rest)
        if counts is None or counts["result"] is None:
            raise ValueError(
                f"{text!r} is no place: {rest!r} does not end with '#occurrence.result', two numbers. A place is "
                f"{_FORM}."
            )
        module, call = _without_call(module)
        try:
            return cls(module, counts["operator"], int(counts["occurrence"]), int(counts["result"]), call or 0)
        except ValueError as error:
            raise ValueError(f"{text!r} is no place. {error}") from None


@dataclasses.dataclass(frozen=True)
class Selector:
    """A set of places: patterns (see `matches`) of modules and operators, and counts; None matches any.

    `"layers.*.mlp::aten.mm"`: what `mm` makes in these modules. Without `::` a text names modules or an operator
    (operators have a dot: `"aten.mm"`, all overloads, `"aten.mm.default"`). After `::` a word without a dot is the
    short name of an
    operator: `"::softmax"`. `@1` after a module, `#0` and `#0.1` after an operator select call, occurrence and result.
    """

    module: str | None
    operator: str | None
    #: Of modules or operators, if the text does not say which.
    name: str | None = None
    call: int | None = None
    occurrence: int | None = None
    result: int | None = None
    #: An operator without its namespace, overload and leading underscores.
    word: str | None = None

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def parse(cls, text: str) -> "Selector":
        """Return the selector with a text.

        Raises:
            ValueError: no selector has this text; says which part is wrong.
        """
        module, colons, rest = text.rpartition("::")
        if not text or (colons and not rest):
            raise ValueError(f"{text!r} selects nothing: after '::' goes an operator.")
        counts = _COUNTS.fullmatch(rest)
        if counts is None:
            raise ValueError(f"{text!r}: after '#' goes an occurrence, or occurrence.result: numbers from 0 on.")
        operator = counts["operator"]
        occurrence, result = (None if counts[name] is None else int(counts[name]) for name in ("occurrence", "result"))
        matches(operator, "")  # raises if it is not a valid pattern
        if not colons and occurrence is None:
            name, call = _without_call(rest)
            return cls(name, None, call=call) if call is not None else cls(None, None, name)
        is_word = "." not in operator and "**" not in operator
        if is_word and not colons:
            raise ValueError(f"{text!r}: {operator!r} is no operator. Operators have a dot: aten.mm, aten.mm.default.")
        name, call = _without_call(module)
        matches(name, "")
        both = (None, operator) if is_word else (operator, None)
        return cls(name or None, both[0], None, call, occurrence, result, both[1])

    def has(self, place: Place) -> bool:
        """Whether a place is in the set."""
        counts = (self.call, place.call), (self.occurrence, place.occurrence), (self.result, place.result)
        return all(one in (None, other) for one, other in counts) and self.covers(place.module, place.operator)

    def is_of_operator(self, operator: str) -> bool:
        """Whether the text restricts operators, and this is one of them."""
        if self.word is not None:
            return not _is_any(self.word)
        pattern = self.operator if self.operator is not None else self.name
        names = operator, operator.rpartition(".")[0]
        return pattern is not None and not _is_any(pattern) and any(matches(pattern, name) for name in names)

    def covers(self, module: str | None, operator: str) -> bool:
        """Whether a result of an operator in a module may be in the set."""
        operators = operator, operator.rpartition(".")[0]
        if self.name is not None:
            return any(matches(self.name, name) for name in (*operators, module or ""))
        if self.operator is not None and not any(matches(self.operator, name) for name in operators):
            return False
        if self.word is not None and not any(matches(self.word, name) for name in _short_names(operator)):
            return False
        return self.module is None or (module is not None and matches(self.module, module))


def _is_any(pattern: str) -> bool:
    return not pattern.strip("*?.")


def _short_names(operator: str) -> tuple[str, str]:
    base = operator.split(".")[1]
    return base, base.lstrip("_")


def _without_call(module: str) -> tuple[str, int | None]:
    """Return a module and its call number, None if the text has none."""
    match = _CALL.fullmatch(module)
    return (module, None) if match is None else (match["name"], int(match["call"]))
