"""Pages of a report, a plan and a profile of one model, and what is in a page."""

from __future__ import annotations

from html.parser import HTMLParser

import torch
from torch import Tensor, nn

import actckpt

#: What would be a script, were it not escaped.
NAME = "<script>console['error']('run' + \"&\")</script>"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.add_module(NAME, nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.get_submodule(NAME)(self.norm(x))
        return x + y


class Found:
    """A plan, and the report and the profile of its model."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 1))
        x = torch.randn(64, 32)

        def step() -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        self.profile = actckpt.profile(step, model=model)
        self.plan = actckpt.plan(step, model=model, activation_budget="60%")
        actckpt.apply(model, policy=self.plan)
        step()
        self.report = actckpt.report(model, top=1)
        actckpt.remove(model)
        actckpt.apply(model)
        step()
        self.report_without_plan = actckpt.report(model)
        self.all = {
            "report": self.report,
            "report without plan": self.report_without_plan,
            "plan": self.plan,
            "profile": self.profile,
        }

    def page(self, name: str) -> str:
        """Return the page of one of them."""
        page = self.all[name].to_html()
        assert page is not None
        return page


class Parsed(HTMLParser):
    """The elements of a page, its text by element, and its tables as rows of cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._path: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self._path.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        while self._path and self._path.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._path):
            self.text += data
        if {"th", "td"} & set(self._path):
            self.tables[-1][-1][-1] += data

    def column(self, table: int, name: str) -> list[str]:
        """Return the cells of a column."""
        header, *rows = self.tables[table]
        return [row[header.index(name)] for row in rows]
