"""Which places of a plan repeat a collective."""

from actckpt import Action
from actckpt._budget import running

PLACE = "Reduced::_c10d_functional.all_reduce.default#0.0"


def test_plans_repeat_none() -> None:
    assert running._repeats(PLACE, Action.RECOMPUTE)
    assert not running._repeats(PLACE, Action.KEEP)
    assert not running._repeats("Reduced::aten.exp.default#0.0", Action.RECOMPUTE)
