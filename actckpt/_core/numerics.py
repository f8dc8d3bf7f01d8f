"""torch settings that change operator results: recorded in forward, restored for rerun and replay.

NOTE [ Settings ]

A rerun runs under the settings of its forward. A replayed operator runs under the settings that it ran under, even if
they covered only part of its region (`torch.backends.mkldnn.flags` around one layer). So every recorded operator
records them: elementwise operators the few that they depend on, all others all. C++ reads them (csrc/core/numerics.h);
equal settings share one tuple. They are set only where they differ, and restored afterwards, also after an error.

All of them except `torch.set_flush_denormal`, which is per thread, are process-wide. While they are set for a rerun or
a replayed operator, other threads see them, as with torch's own contexts.

Operators read `fp32_precision` per backend and operator, so that is recorded. Older settings
(`torch.set_float32_matmul_precision`, `allow_tf32`) express the same, and their getters raise where both disagree. So
the older settings are set to agree while recorded precisions are in force.

tests/contract/test_numeric_settings.py classifies every public setter of torch.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from actckpt import _C
from actckpt._core.torch_private import settings as torch_settings
from actckpt._core.torch_private.settings import Flag

__all__ = ["Setting", "connect", "in_force", "restored"]

#: By backend and operator.
Precisions = Mapping[tuple[str, str], str]

_PRECISIONS = tuple((backend, operator) for backend in ("mkldnn", "cuda") for operator in ("matmul", "conv", "rnn"))


class Setting(NamedTuple):
    """One setting: its getter, called with `args`, and its setter.

    For Python flags of torch, `get` is the dict of the module's names, and `args` has the flag's name.
    """

    name: str
    get: Callable[..., Any] | dict[str, Any]
    args: tuple[Any, ...]
    set: Callable[[Any], Any]

    @property
    def is_precision(self) -> bool:
        """Whether it is the precision of float32 operators."""
        return self.args in _PRECISIONS


#: The recorded settings, in the order of `_C.numerics()`; elementwise operators record only the first ones.
in_force: list[Setting] = []


def connect(*, on_cuda: bool, on_hip: bool) -> None:
    """Pass the settings to read to the C++ extension.

    Args:
        on_cuda: include CUDA's; torch uses the same names for ROCm.
        on_hip: include those of ROCm only.
    """
    of_elements = _of_elements()
    in_force[:] = [*of_elements, *_others(on_cuda, on_hip)]
    _C.connect_numerics([(setting.get, setting.args) for setting in in_force], len(of_elements))


def _of_elements() -> list[Setting]:
    return [
        Setting("denormals", _C.flushes_denormals, (), torch.set_flush_denormal),
        Setting("default_dtype", torch.get_default_dtype, (), torch.set_default_dtype),
        # Each thread computes the last elements of its part without vectors: with other bits in SiLU.
        Setting("num_threads", torch.get_num_threads, (), torch.set_num_threads),
        *_settings(torch_settings.flags_of_elements),
    ]


def _others(on_cuda: bool, on_hip: bool) -> list[Setting]:
    get, warns = torch_settings.must_be_deterministic, torch_settings.nondeterminism_warns
    set_both = torch_settings.set_deterministic
    settings = [
        Setting("deterministic_algorithms", get, (), lambda value: set_both(value, warn_only=warns())),
        Setting("deterministic_algorithms_warn_only", warns, (), lambda value: set_both(get(), warn_only=value)),
        *_settings(torch_settings.flags_of_cpus),
        *_precision_settings("mkldnn"),
        *(
            Setting(flag, names, (flag,), partial(names.__setitem__, flag))
            for names, flag in torch_settings.python_flags
        ),
    ]
    if on_cuda:
        settings += [*_settings(torch_settings.flags_of_cuda), *_precision_settings("cuda")]
    if on_hip:
        settings += _settings(torch_settings.flags_of_hip)
    return settings


def _settings(flags: tuple[Flag, ...]) -> list[Setting]:
    return [Setting(name, getter, (), setter) for name, getter, setter in flags]


def _precision_settings(backend: str) -> list[Setting]:
    get = torch_settings.get_precision
    pairs = [pair for pair in _PRECISIONS if pair[0] == backend]
    return [Setting(".".join(pair), get, pair, partial(_set_precision, pair)) for pair in pairs]


@contextmanager
def restored(noted: tuple[Any, ...]) -> Iterator[None]:
    """Run the body under recorded settings, then restore the current ones."""
    outside = _C.numerics()
    changed = [(setting, value) for setting, value, now in zip(in_force, noted, outside, strict=False) if value != now]
    precisions = {setting.args: value for setting, value in changed if setting.is_precision}
    with _precisions_in_force(precisions) if precisions else nullcontext():
        try:
            for setting, value in changed:
                if not setting.is_precision:
                    setting.set(value)
            yield
        finally:
            for setting, value, now in zip(in_force, outside, _C.numerics(), strict=True):
                if value != now and not setting.is_precision:
                    setting.set(value)


@contextmanager
def _precisions_in_force(noted: Precisions) -> Iterator[None]:
    get = torch_settings.get_precision
    outside = {pair: get(*pair) for pair in _PRECISIONS}
    older = {flag: value for flag in torch_settings.older_precisions if (value := _older_value(flag)) is not None}
    inside = {**outside, **noted}
    try:
        _put_precisions(inside, {flag: _OLDER[flag[0]](inside) for flag in older})
        yield
    finally:
        _put_precisions(outside, older)


def _put_precisions(precisions: Precisions, older: Mapping[Flag, Any]) -> None:
    get = torch_settings.get_precision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings
        for flag, value in older.items():
            if _older_value(flag) != value:
                flag[2](value)
    for pair, value in precisions.items():
        if get(*pair) != value:
            _set_precision(pair, value)


def _older_value(flag: Flag) -> Any:
    """Return an older precision setting, None if torch refuses to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return flag[1]()
        except RuntimeError:
            return None


def _set_precision(pair: tuple[str, str], value: str) -> None:
    """Set the precision that an operator uses: its own or, if unset, that of its backend or the global one."""
    get = torch_settings.get_precision
    torch_settings.set_precision(*pair, "none")  # inherits, unless set below
    if get(*pair) != value:
        torch_settings.set_precision(*pair, "ieee" if value == "none" else value)


def _matmul_precision(precisions: Precisions) -> str:
    matmul = precisions["mkldnn", "matmul"], precisions["cuda", "matmul"]
    return "medium" if "bf16" in matmul else "high" if "tf32" in matmul else "highest"


#: The values of the older settings that agree with given precisions.
_OLDER: dict[str, Callable[[Precisions], Any]] = {
    "float32_matmul_precision": _matmul_precision,
    "cudnn_allow_tf32": lambda precisions: precisions["cuda", "conv"] == "tf32",
}

connect(on_cuda=torch.backends.cuda.is_built(), on_hip=torch.version.hip is not None)
