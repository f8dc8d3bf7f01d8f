"""Making room: one call asks every holder of bytes that can be brought back to give some of them up.

NOTE [ Pressure ]

Rule 1. What a holder gives up comes back when backward asks for it: it is copied, replayed or rerun once more, and
        bit-identical. So a call may come at any time, from any thread: between operators, from a hook of a backward,
        while other threads run backwards of their own.
Rule 2. Holders are asked in the order of `ORDER`, by what it costs to have the bytes again: one copy, that was begun
        too early anyway; one copy; the operators that lead to one value; the function of a region; and last memory of
        the host, from which no tensor is taken: there new slabs would have to be registered with the driver.
Rule 3. A holder counts bytes that are free when it returns, and of copies under way those that are free once they have
        ended. It counts nothing that others hold, too.
Rule 4. A holder waits for nobody: it takes no lock that is held while an operator or code of the user runs. It puts its
        own state right first, and frees tensors after that, since freeing may run code of the user.
"""

from collections.abc import Callable

__all__ = ["ORDER", "register", "release"]

#: The names of all holders, in the order in which they are asked.
ORDER = (
    "read-ahead",  # moved bytes that backward has not asked for yet (csrc/offload/reading.h)
    "reloads",  # moved bytes that one saved tensor asked for, and that wait for others on them
    "replay caches",  # replayed values that the same backward asks for again (csrc/graph/needs.h)
    "rerun values",  # what reruns brought back, and backward has not asked for yet (csrc/rerun/frame.h)
    "host pool",  # free memory of the stores
)

_holders: dict[str, Callable[[int], int]] = {}


def register(name: str, release: Callable[[int], int]) -> None:
    """Add a holder.

    Args:
        name: one of `ORDER`.
        release: gives up bytes until as many are released as it is asked for, or none are left; returns how many were.
            See Rules 3 and 4.

    Raises:
        ValueError: `ORDER` does not name it, or another holder has the name.
    """
    if name not in ORDER or name in _holders:
        raise ValueError(f"No holder can be registered as {name!r}. Give it a name of its own in pressure.ORDER.")
    _holders[name] = release


def release(nbytes: int) -> dict[str, int]:
    """Ask the holders in turn for bytes until `nbytes` are released or none are left.

    Returns:
        The bytes that each holder released which was asked, by its name, in the order of asking.
    """
    given: dict[str, int] = {}
    missing = nbytes
    for name in ORDER:
        if missing <= 0:
            break
        if name in _holders:
            given[name] = _holders[name](missing)
            missing -= given[name]
    return given
