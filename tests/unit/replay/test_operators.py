"""The tables of operators, against the schemas, the tags, the documentation and the kernels of the installed torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import actckpt
from actckpt._replay import operators, recorder
from actckpt._replay.operators import Operator, operator_of
from actckpt._text import operator_names

aten = torch.ops.aten


def _all_overloads() -> Iterator[Any]:
    for name in sorted(operator_names.known()):
        namespace, _, rest = name.partition(".")
        base, _, overload = rest.partition(".")
        if namespace == "aten" and overload:
            yield getattr(getattr(aten, base), overload)


OVERLOADS = list(_all_overloads())
OPERATORS = [operator_of(func) for func in OVERLOADS]


def _base(operator: Operator) -> str:
    return str(operator.func._schema.name).removeprefix("aten::")


#: Names of namespaces, of arguments, and tags.
_NO_OPERATORS = ("_REPEATABLE", "_INDICES", "_DATA_DEPENDENT")
TABLES = {
    name: table
    for name, table in vars(operators).items()
    if isinstance(table, (frozenset, dict)) and re.fullmatch("_[A-Z_]+", name) and name not in _NO_OPERATORS
}
#: Namespaces of operators that need not be there.
_OF_LIBRARIES = ("flash_attn::", "xformers_flash::")


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_name_in_a_table_is_an_operator(table: str) -> None:
    names = {name.removeprefix("aten::") for name in TABLES[table] if not name.startswith(_OF_LIBRARIES)}
    assert names
    assert {name for name in names if not hasattr(aten, name)} == set()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch that is built without distributed")
def test_collectives_that_can_be_repeated_return_tensors_that_they_make() -> None:
    for name in operators._REPEATABLE:
        operator = operator_of(getattr(torch.ops._c10d_functional, name).default)
        assert operator.is_repeatable and not operator.written
        assert operator.makes_one != name.endswith("_coalesced")  # these return a list


def test_operators_and_tables_are_found() -> None:
    assert len(OVERLOADS) > 2000
    assert set(TABLES) >= {"_UNINITIALISED", "_OVERWRITE", "_HIDDEN_WRITES", "_NONDETERMINISTIC_ON_CUDA"}


def test_sizes_that_depend_on_data_route_and_results_do_not() -> None:
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    for operator in OPERATORS:
        arguments = operator.func._schema.arguments
        if tags.intersection(operator.func.tags) and any("Tensor" in str(each.type) for each in arguments):
            assert operator.routed_by or "unpool" in operator.name, operator.name
        written = [number for number, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write]
        assert not {position for position, _ in operator.routed_by}.intersection(written), operator.name


# Writes.


def _written_by_text(func: Any) -> tuple[set[str], set[str]]:
    """Return which positional arguments and which keywords the text of a schema says are written to."""
    text = str(func._schema)
    arguments = text[text.index("(") + 1 : text.rindex(") -> ")]
    positional, _, keywords = re.sub(r"\(([a-z|]+)(!?)[^)]*\)", r"<\1\2>", arguments).partition("*, ")

    def names(part: str) -> set[str]:
        items = re.split(r", (?![^\[]*\])", part)
        return {item.split("=")[0].split()[-1] for item in items if re.search(r"<[a-z|]+!>", item)}

    return names(positional), names(keywords)


def test_written_arguments_are_those_that_the_text_of_the_schema_marks() -> None:
    wrong = []
    for operator in OPERATORS:
        positional, keywords = _written_by_text(operator.func)
        names = [argument.name for argument in operator.func._schema.arguments]
        if _base(operator) in operators._WRITE_NOTHING:
            assert not operator.written and not operator.written_names
        elif ({names[place] for place in operator.written}, set(operator.written_names)) != (positional, keywords):
            wrong.append(operator.name)
    assert wrong == []


def test_operators_that_write_or_return_aliases_are_never_plain_in_silence() -> None:
    for operator in OPERATORS:
        schema = operator.func._schema
        if schema.is_mutable and _base(operator) not in operators._WRITE_NOTHING:
            assert not operator.is_plain and not operator.is_view, operator.name
        if operator.is_view:
            assert any(argument.alias_info is not None for argument in schema.arguments), operator.name


@pytest.mark.parametrize("name", sorted(operators._HIDDEN_WRITES))
def test_hidden_writes_go_to_running_statistics_and_to_the_state_of_dropout(name: str) -> None:
    places, flag = operators._HIDDEN_WRITES[name]
    packet = getattr(aten, name.removeprefix("aten::"))
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        written = ["dropout_state"] if name.endswith("_rnn") else ["running_mean", "running_var"]
        assert [arguments[place].name for place in places] == written
        assert all(arguments[place].alias_info is None for place in places), "the schema says so now: drop the entry"
        flags = ("dropout",) if name.endswith("_rnn") else ("training", "train", "use_input_stats")
        assert flag is None or arguments[flag].name in flags


def test_every_operator_with_running_statistics_is_known_or_says_that_it_writes() -> None:
    silent = set()
    for operator in OPERATORS:
        arguments = operator.func._schema.arguments
        places = [place for place, argument in enumerate(arguments) if argument.name in ("running_mean", "running_var")]
        says_so = any(arguments[place].alias_info is not None for place in places)
        if places and not says_so and operator.hidden_writes is None:
            silent.add(_base(operator))
    composite = {"_batch_norm_impl_index"}  # made of others, which are recorded
    backward = {name for name in silent if name.endswith("_backward")}
    reads_only = {"_native_batch_norm_legit_no_training", "_batch_norm_no_update"}
    returns_them = {"_native_batch_norm_legit_functional", "_batch_norm_with_update_functional"}
    assert silent - composite - backward - reads_only - returns_them == set()
    for name in composite:
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key), name


@pytest.mark.parametrize("name", sorted(operators._SAVED_BEFORE_WRITTEN))
def test_arguments_saved_before_they_are_written_are_there(name: str) -> None:
    operator = operator_of(getattr(aten, name.removeprefix("aten::")).default)
    argument = operator.func._schema.arguments[operator.saved_before_written]
    assert argument.name == operators._SAVED_BEFORE_WRITTEN[name]
    assert operator.saved_before_written in operator.written or argument.alias_info is None


# Overwriting.


def _values_for(argument: Any, target: Tensor) -> Any:
    """Return something that an argument of an overwriting operator takes."""
    if argument.name == "p":
        return torch.full(target.shape, 0.5) if str(argument.type) == "Tensor" else 0.5
    known = {"src": torch.arange(6.0).view(2, 3), "value": 3.0, "from": 1, "to": 7}
    if argument.name == "value" and str(argument.type) == "Tensor":
        return torch.tensor(3.0)
    return known[argument.name]


def _overwritten(func: Any, before: float) -> Tensor:
    torch.manual_seed(1)
    memory = torch.full((2, 3), before)
    required = [a for a in func._schema.arguments[1:] if not a.has_default_value() and not a.kwarg_only]
    func(memory, *(_values_for(argument, memory) for argument in required))
    return memory


@pytest.mark.parametrize(
    "func",
    [func for func in OVERLOADS if func._schema.name.removeprefix("aten::") in operators._OVERWRITE],
    ids=str,
)
def test_what_overwrites_leaves_nothing_of_what_was_there(func: Any) -> None:
    assert operator_of(func).overwrites
    first, second = _overwritten(func, float("nan")), _overwritten(func, -5.0)
    assert not first.isnan().any()
    assert torch.equal(first, second)


def test_every_factory_of_empty_memory_is_known() -> None:
    found = {_base(operator) for operator in OPERATORS if re.search(r"(^|_)empty", _base(operator))}
    assert found == operators._UNINITIALISED


# Randomness.


def test_every_operator_tagged_random_or_that_takes_a_generator_is_known_as_random() -> None:
    for operator in OPERATORS:
        is_tagged = torch.Tag.nondeterministic_seeded in operator.func.tags
        takes_generator = any("Generator" in str(argument.type) for argument in operator.func._schema.arguments)
        assert operator.is_random == is_tagged, operator.name
        assert operator.is_random or not takes_generator, operator.name
        assert not (operator.is_random and operator.is_plain), operator.name
        assert (operator.generator_name is not None) == takes_generator, operator.name


# Nondeterminism.

#: Names in the documentation of `torch.use_deterministic_algorithms`, and the operators behind them.
DOCUMENTED = {
    "torch.nn.ConvTranspose1d": {"convolution"},
    "torch.nn.ConvTranspose2d": {"convolution"},
    "torch.nn.ConvTranspose3d": {"convolution"},
    "torch.Tensor.index_put": {"index_put", "index_put_", "_index_put_impl_"},
    "torch.Tensor.put_": {"put", "put_"},
    "torch.Tensor.scatter_add_": {"scatter_add", "scatter_add_"},
    "torch.index_add": {"index_add", "index_add_"},
    "torch.Tensor.index_reduce": {"index_reduce", "index_reduce_"},
    "torch.Tensor.index_copy": {"index_copy", "index_copy_"},
    "torch.Tensor.scatter": {"scatter", "scatter_"},
    "torch.Tensor.scatter_reduce": {"scatter_reduce", "scatter_reduce_"},
    "torch.nn.MaxUnpool1d": {"max_unpool2d"},
    "torch.nn.MaxUnpool2d": {"max_unpool2d"},
    "torch.nn.MaxUnpool3d": {"max_unpool3d"},
    "torch.nn.NLLLoss": {"nll_loss2d_forward"},
    "torch.histc": {"histc"},
    "torch.bincount": {"bincount"},
    "torch.median": {"median", "nanmedian"},
    "torch.kthvalue": {"kthvalue"},
    "torch.cumsum": {"cumsum", "cumsum_"},
}
#: cuDNN documents all its algorithms of a forward convolution as deterministic; sparse tensors are never replayed;
#: storages that are resized neither. torch 2.9 named products of matrices for a workspace of cuBLAS that is shared by
#: streams: what runs them in one stream, as replay does, gets the same bytes.
HANDLED = {
    *("torch.mm", "torch.mv"),
    *("torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d", "torch.bmm", "torch.Tensor.resize_"),
}


def test_what_torch_documents_as_nondeterministic_in_forward_is_known() -> None:
    text = torch.use_deterministic_algorithms.__doc__ or ""
    bullets = re.findall(r"\* :\w+:`([\w.]+)`(.*?)(?=\n\s*\*|\n\n)", text, re.DOTALL)
    assert len(bullets) > 30
    forward = {name for name, when in bullets if "differentiate" not in when and "requires grad" not in when}
    assert forward - set(DOCUMENTED) - HANDLED == set(), "new in torch: add them to _NONDETERMINISTIC_ON_CUDA"
    for names in DOCUMENTED.values():
        for name in names:
            packet = getattr(aten, name)
            assert all(operator_of(getattr(packet, o)).is_nondeterministic_on_cuda for o in packet.overloads()), name


class _OnGpu(Tensor):
    """Says that it is on a GPU."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False


@pytest.mark.parametrize("is_transposed", [True, False])
def test_only_transposed_convolutions_are_nondeterministic(is_transposed: bool) -> None:
    operator = operator_of(aten.convolution.default)
    assert operator.func._schema.arguments[operator.nondeterministic_flag].name == "transposed"
    image, weight = torch.ones(1, 1, 3, 3).as_subclass(_OnGpu), torch.ones(1, 1, 1, 1)
    args = (image, weight, None, [1, 1], [0, 0], [1, 1], is_transposed, [0, 0], 1)
    assert bool(recorder._why_opaque(operator, args, False)) is is_transposed
    torch.use_deterministic_algorithms(True)
    try:
        assert not recorder._why_opaque(operator, args, False)
    finally:
        torch.use_deterministic_algorithms(False)


# What comes from outside.


def test_bytes_of_a_file_are_not_read_again(tmp_path: Any) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(torch.arange(4.0).numpy().tobytes())
    x = torch.ones(4, requires_grad=True)
    with actckpt.region() as region:
        y = x * torch.from_file(str(path), size=4)
    (tmp_path / "others").write_bytes(bytes(16))
    (tmp_path / "others").replace(path)  # what is mapped already stays as it is
    y.sum().backward()
    assert torch.equal(x.grad, torch.arange(4.0))  # type: ignore[arg-type]
    assert [row.not_replayed for row in region.report().rows] == [{"read from outside of the program": 1}]
