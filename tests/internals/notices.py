"""Warnings that a process tells once."""

from __future__ import annotations

import pytest

from actckpt._core import sites

__all__ = ["forget_told"]


def forget_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test see what an earlier one may have been told already."""
    monkeypatch.setattr(sites, "_shown", set())
