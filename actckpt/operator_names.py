"""Names of operators that the installed torch knows, and those nearest to a name that it does not know."""

import difflib
import fnmatch

import torch

__all__ = ["exists", "known", "nearest"]


def known() -> set[str]:
    """Return the names of all operators, with and without their overload: `aten.mul.Tensor`, `aten.mul`.

    torch has no public list. Missing: none, and nothing is checked against it.
    """
    list_names = getattr(torch._C, "_dispatch_get_all_op_names", list)
    names = {name.replace("::", ".") for name in list_names()}
    full = {name if name.count(".") > 1 else f"{name}.default" for name in names}
    return full | {name.rpartition(".")[0] for name in full}


def exists(pattern: str) -> bool:
    """Whether an operator has a name, which may have wildcards; True where torch does not tell."""
    names = known()
    return not names or bool(fnmatch.filter(names, pattern))


def nearest(name: str) -> str:
    """Return the names nearest to one, for a message."""
    return ", ".join(difflib.get_close_matches(name, known(), n=3)) or "none"
