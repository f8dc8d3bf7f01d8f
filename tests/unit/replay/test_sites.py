"""What tells one call site from another."""

from __future__ import annotations

from typing import Any

from actckpt._replay import audit
from actckpt._replay.audit import site_of


def _compiled() -> Any:
    return compile("x = 1\ny = 2\n", "made up", "exec")


def test_equal_code_and_line_are_one_site_whichever_object_the_code_is() -> None:
    code, again = _compiled(), _compiled()
    assert code is not again
    assert site_of((code, 1)) is site_of((code, 1)) is site_of((again, 1))
    assert site_of((code, 1)) is not site_of((code, 2))


def test_a_site_does_not_go_by_the_address_of_code_that_is_gone() -> None:
    for number in range(100):
        site = site_of((compile(f"x = {number}", "made up", "exec"), 1))
        assert site.num_calls == 0
        site.num_calls = 1


def test_a_site_goes_by_what_the_code_does_where_two_begin_at_one_place() -> None:
    one, other = (lambda x: x.sin()), (lambda x: x.cos())  # fmt: skip
    assert site_of(audit.caller_of(one)) is site_of(audit.caller_of(one)) is not site_of(audit.caller_of(other))


def test_what_is_remembered_of_code_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(audit, "_MAX_SITES", 10)
    codes = [compile(f"z = {number}", f"made up {number}", "exec") for number in range(30)]
    for code in codes:
        site_of((code, 1))
    assert len(audit._by_line) <= 10
