"""`actckpt run`: programs train as without it, with their model checkpointed."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

from actckpt import cli

_NETWORKS = """
import sys
import warnings

import torch
from torch import nn

torch.manual_seed(0)


def block(width):
    return nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))


class Generator(nn.Sequential):
    pass


def train(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""
#: Programs, the model that `run` checkpoints in each, and how many blocks it has.
_PROGRAMS = {
    "function": (
        "Sequential",
        4,
        """
        def main():
            model = nn.Sequential(*(block(16) for _ in range(4)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
            for _ in range(4):
                print(train(model, optimizer, torch.randn(32, 16)))

        if __name__ == "__main__":
            main()
        """,
    ),
    "evaluation first": (
        "Sequential",
        3,
        """
        model = nn.Sequential(*(block(16) for _ in range(3)))
        other = nn.Sequential(*(block(16) for _ in range(9)))
        optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
        with torch.no_grad():
            print(other(torch.ones(2, 16)).sum().item())
        for _ in range(2):
            print(train(model, optimizer, torch.randn(32, 16)))
        """,
    ),
    "adversaries": (
        "Generator",
        5,
        """
        generator, critic = Generator(*(block(32) for _ in range(5))), nn.Sequential(*(block(32) for _ in range(3)))
        optimizers = [torch.optim.SGD(net.parameters(), lr=float(sys.argv[1])) for net in (critic, generator)]
        for _ in range(3):
            made = generator(torch.randn(8, 32))
            for sign, optimizer, x in ((1, optimizers[0], made.detach()), (-1, optimizers[1], made)):
                loss = sign * critic(x).mean() - critic(torch.ones(8, 32)).mean()
                loss.backward()
                optimizer.step()
                print(loss.item())
                critic.zero_grad()
            generator.zero_grad()
        """,
    ),
    "calls that the program wraps, and a trace": (
        "Sequential",
        3,
        """
        model = nn.Sequential(*(block(16) for _ in range(3)))
        with warnings.catch_warnings(action="ignore"):  # it is deprecated
            torch.jit.trace(model, torch.ones(2, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
        call, numbers = nn.Module.__call__, []

        def counted(module, *args):
            numbers.extend([1] if module is model else [])
            return call(module, *args)

        nn.Module.__call__ = counted
        for _ in range(3):
            print(train(model, optimizer, torch.randn(32, 16)))
        nn.Module.__call__ = call
        print(len(numbers))
        """,
    ),
    "critic first": (
        "Generator",
        5,
        """
        generator, critic = Generator(*(block(32) for _ in range(5))), nn.Sequential(*(block(32) for _ in range(3)))
        optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=float(sys.argv[1]))
        for _ in range(3):
            real = critic(torch.ones(8, 32)).mean()
            loss = critic(generator(torch.randn(8, 32))).mean() - real
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())
        """,
    ),
}
_OPTIONS = ([], ["--policy", "matmuls"], ["--activation-budget", "70%"])


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs stay the main module: the command is the last thing that its process runs."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))


def _written(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(_NETWORKS + textwrap.dedent(text))
    return path


@pytest.mark.filterwarnings("ignore:apply. ", "ignore:A region")
@pytest.mark.parametrize("options", _OPTIONS, ids=lambda options: " ".join(options))
@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_program_prints_what_it_prints_alone(
    name: str,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, num_blocks, text = _PROGRAMS[name]
    path = _written(tmp_path, text)
    monkeypatch.setattr(sys, "argv", [str(path), "0.01"])
    runpy.run_path(str(path), run_name="__main__")
    plain = capsys.readouterr().out
    assert cli.main(["run", *options, str(path), "0.01"]) == 0
    printed = capsys.readouterr()
    assert printed.out == plain and printed.out
    assert f"actckpt run: {num_blocks} blocks of {model} are checkpointed" in printed.err
    report = printed.err.partition(f"actckpt run: report of {model}\n")[2]
    assert f"\n{num_blocks} of {num_blocks} blocks ran" in f"\n{report}"


def test_optimizers_of_the_model_count_toward_a_budget(tmp_path: Path) -> None:
    path = _written(
        tmp_path, _PROGRAMS["function"][2].replace("block(16)", "block(1024)").replace("32, 16", "32, 1024")
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert cli.main(["run", "--budget", "2MiB", str(path), "0.01"]) == 0
    texts = " ".join(str(each.message) for each in told if "No plan fits" in str(each.message))
    # Of four blocks in float32; gradients and two states are as large.
    parameter_bytes = 4 * 4 * (2 * 1024 * 64 + 64 + 1024)
    assert max(float(size) for size in re.findall(r"\((\d+) bytes\)", texts)) > 4 * parameter_bytes


def test_the_named_model_is_checkpointed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _written(tmp_path, _PROGRAMS["adversaries"][2])
    assert cli.main(["run", "--model", "critic", str(path), "0.01"]) == 0
    assert "actckpt run: 3 blocks of Sequential are checkpointed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text", "said"),
    [
        ([], "print(block(4)(torch.ones(1, 4)).requires_grad)", "found no repeated blocks"),
        ([], "with torch.no_grad(): block(4)(torch.ones(1, 4))", "no module with parameters to train was called"),
        (["--model", "nets.main"], "block(4)(torch.ones(1, 4))", "the main module has no nets.main"),
    ],
)
def test_a_program_whose_model_has_no_blocks_says_so(
    options: list[str], text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *options, str(_written(tmp_path, text))]) == 0
    error = capsys.readouterr().err
    assert "actckpt run: nothing was checkpointed" in error and said in error


@pytest.mark.parametrize(
    ("text", "options", "error", "said"),
    [
        ("block(4)(torch.ones(1, 4)); 1 / 0", [], ZeroDivisionError("division by zero"), ""),
        ("raise BrokenPipeError('mine')", [], BrokenPipeError("mine"), ""),
        ("sys.exit(7)", [], SystemExit(7), "nothing was checkpointed"),
        ("sys.exit(2)", ["--budget=1GiB"], SystemExit(2), "options of actckpt run stand before"),
    ],
)
def test_what_a_program_raises_leaves_and_modules_are_called_by_torch_again(
    text: str, options: list[str], error: BaseException, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.nn.Module.__call__
    path = str(_written(tmp_path, text))
    with pytest.raises(type(error)) as raised:
        cli.main(["run", path, *options])
    assert raised.value.args == error.args
    assert torch.nn.Module.__call__ is before
    shown = capsys.readouterr().err
    assert said in shown if said else not shown


def test_a_launcher_runs_the_module_whose_exit_handlers_find_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    at_exit = """
    import atexit, pickle

    class Kept:
        pass

    atexit.register(lambda: print(len(pickle.dumps(Kept())) > 0))
    """
    text = _NETWORKS + textwrap.dedent(at_exit) + textwrap.dedent(_PROGRAMS["function"][2])
    (tmp_path / "package" / "train.py").write_text(text)
    words = ["-m", "actckpt.run", "--policy", "matmuls", "-m", "package.train", "0.01"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[4:] == ["True"] and "4 of 4 blocks ran (policy='matmuls')" in done.stderr


@pytest.mark.parametrize("suffix", [".html", ".txt"])
def test_the_report_goes_to_a_file_too_wherever_the_program_goes(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    path = tmp_path / "program.py"
    path.write_text(_NETWORKS + "import os; os.chdir('other')\n" + textwrap.dedent(_PROGRAMS["function"][2]))
    assert cli.main(["run", "--report", f"out{suffix}", str(path), "0.01"]) == 0
    written, error = (tmp_path / f"out{suffix}").read_text(), capsys.readouterr().err
    assert (
        "4 of 4 blocks ran (policy='recompute')" in error and f"The report is in {tmp_path / f'out{suffix}'}." in error
    )
    if suffix == ".html":
        assert written.startswith("<!DOCTYPE html>") and "4 of 4 blocks ran" in written
    else:
        assert written in error


def test_a_report_that_cannot_be_written_leaves_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _written(tmp_path, _PROGRAMS["function"][2])
    (tmp_path / "out.html").mkdir()
    assert cli.main(["run", "--report", str(tmp_path / "out.html"), str(path), "0.01"]) == 0
    assert "The report was not written: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["run", "--report", str(tmp_path / "no" / "out.html"), str(path), "0.01"])
    assert exit_info.value.code == 2
    assert "there is no folder" in capsys.readouterr().err
