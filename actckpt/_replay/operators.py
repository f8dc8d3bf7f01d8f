"""What the recorder must know about an operator: looked up once in its schema, and in short tables."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actckpt._core import torch_private
from actckpt._core.ranks import COLLECTIVE_NAMESPACES
from actckpt._replay import direct

__all__ = ["Operator", "is_collective", "operator_of"]

#: They allocate and write nothing (Rule 4).
_UNINITIALISED = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
        *("empty_quantized", "_empty_affine_quantized", "_empty_per_channel_affine_quantized"),
    }
)

#: They read bytes that no tensor holds, and that others may change.
_READ_OUTSIDE = frozenset({"from_file"})

#: They write every element of the tensor that they change, whatever it held.
_OVERWRITE = frozenset(
    {
        *("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_"),
        *("cauchy_", "log_normal_"),
    }
)

#: They say that they write, and change no bytes.
_WRITE_NOTHING = frozenset({"record_stream"})

#: They change what a storage is, rather than what it holds: never executed again.
_RESHAPE_STORAGE = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})

#: Of these, the functional ones that replay can repeat: NOTE [ Repeated collectives ].
_REPEATABLE = frozenset(
    {
        *("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast"),
        *("all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "all_reduce_coalesced"),
    }
)

#: Operators that write to arguments without saying so in their schema: the positions of these
#: arguments, and of the flag that switches the writing on, None where there is none (Rule 5).
_HIDDEN_WRITES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "aten::native_batch_norm": ((3, 4), 5),
    "aten::cudnn_batch_norm": ((3, 4), 5),
    "aten::miopen_batch_norm": ((3, 4), 5),
    "aten::batch_norm": ((3, 4), 5),  # seen in inference mode only, like the next one
    "aten::instance_norm": ((3, 4), 5),
    "aten::batch_norm_update_stats": ((1, 2), None),
    "aten::batch_norm_gather_stats": ((3, 4), None),
    "aten::batch_norm_gather_stats_with_counts": ((3, 4), None),
    # Dropout between layers draws from a state of its own, which no generator has.
    "aten::_cudnn_rnn": ((15,), 11),
    "aten::miopen_rnn": ((13,), 9),
}

#: Autograd saves the argument that they write to before they write: the name of that argument. What backward must see
#: is what they wrote.
_SAVED_BEFORE_WRITTEN = {
    **dict.fromkeys(("aten::rrelu_with_noise", "aten::rrelu_with_noise_"), "noise"),
    **dict.fromkeys(("aten::_cudnn_rnn", "aten::miopen_rnn"), "dropout_state"),
}

#: How many of their first results audits compare, of all that do not have them all compared. The others are memory for
#: their own backward, which they need not write fully, or seeds of a dropout that attention may be told not to have:
#: equal calls leave different bytes there.
_NUM_COMPARED = {
    **dict.fromkeys(
        (
            *("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn", "aten::cudnn_batch_norm"),
            *("aten::_embedding_bag", "aten::_thnn_fused_lstm_cell", "aten::_ctc_loss"),
        ),
        1,
    ),
    **dict.fromkeys(
        (
            *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"),
            *("aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_fused_attention_overrideable"),
            *("aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward"),
            *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward", "xformers_flash::flash_fwd"),
        ),
        2,
    ),
    "aten::_batch_norm_with_update": 3,
}

#: Of these, the ones that compute the same numbers without running statistics.
_REPLAYED_WITHOUT_STATISTICS = frozenset(_HIDDEN_WRITES) - {
    *("aten::miopen_batch_norm", "aten::_cudnn_rnn", "aten::miopen_rnn")
}

#: Forward operators that `torch.use_deterministic_algorithms` lists as nondeterministic on CUDA (Rule 5).
_NONDETERMINISTIC_ON_CUDA = frozenset(
    {
        *("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "scatter"),
        *("scatter_", "index_put", "index_put_", "_index_put_impl_", "put", "put_", "index_copy", "index_copy_"),
        *("histc", "bincount", "kthvalue", "median", "nanmedian", "cumsum", "cumsum_", "index_reduce"),
        *("index_reduce_", "_embedding_bag", "_unsafe_index_put", "max_unpool2d", "max_unpool3d"),
        *("nll_loss2d_forward",),
    }
)

#: The same where an argument is true: its position. cuDNN runs transposed convolutions with algorithms of gradients.
_NONDETERMINISTIC_ON_CUDA_IF = {"convolution": 6}


#: Operators that are nondeterministic on the CPU, and from how many threads on (Rule 5). Where indices name an element
#: of the result twice, threads add to it with atomic operations, or the last one to write it wins. `linalg_lstsq` gives
#: LAPACK memory that nobody wrote, for its pivots.
_NONDETERMINISTIC_ON_CPU = {
    **dict.fromkeys(
        (
            *("index_put", "index_put_", "_index_put_impl", "_index_put_impl_", "_unsafe_index_put", "put", "put_"),
            *("_unsafe_masked_index_put_accumulate", "index_copy", "index_copy_", "max_unpool2d", "max_unpool3d"),
        ),
        2,
    ),
    "linalg_lstsq": 1,
}


#: By the names of arguments: integer tensors in them say where data goes (NOTE [ Routing ]).
_INDICES = frozenset({"index", "indices", "lengths", "offs", "offsets", "target", "targets"})
#: The same for masks.
_SELECTED_BY_MASK = frozenset({"masked_select", "masked_scatter", "masked_scatter_"})
#: Their indices are those of pooling.
_UNPOOLING = frozenset({"max_unpool2d", "max_unpool3d"})
#: The sizes of what these return, or Python numbers, depend on what tensors hold.
_DATA_DEPENDENT = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


class HigherOrder:
    """An operator whose arguments may be functions: not recorded (Rule 10 of NOTE [ Replay ])."""

    direct = None
    is_recorded = False
    makes_one = False
    num_compared = None
    num_returned = 0
    routed_by = ()
    tensor_positions = 0

    def __init__(self, func: Any) -> None:
        self.func = self.callee = func
        #: As in `torch.ops.<name>`.
        self.name = f"higher_order.{func}"


class Operator:
    """Facts about one overload of an operator."""

    is_recorded = True

    __slots__ = (
        "callee",
        "direct",
        "forgets_versions",
        "func",
        "generator_name",
        "has_effects",
        "hidden_writes",
        "is_collective",
        "is_elementwise",
        "is_foreign",
        "is_nondeterministic_on_cuda",
        "is_plain",
        "is_plain_if_kept",
        "is_random",
        "is_repeatable",
        "is_uninitialised",
        "is_view",
        "makes_one",
        "name",
        "nondeterministic_flag",
        "nondeterministic_threads",
        "num_compared",
        "num_returned",
        "overwrites",
        "reads_outside",
        "reshapes_storage",
        "routed_by",
        "saved_before_written",
        "tensor_positions",
        "written",
        "written_names",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        namespace, _, base = schema.name.partition("::")
        self.func = func
        #: What to call: the same, without a Python frame around it.
        self.callee = torch_private.callee_of(func)
        #: As in `torch.ops.<name>`.
        self.name = str(func)
        #: What runs it in less time, None if nothing does, for arguments by position: see NOTE [ Direct calls ].
        self.direct = direct.FUNCTIONS.get(self.name)
        #: A bit for each argument that is a tensor.
        self.tensor_positions = direct.tensor_positions(schema)
        self._note_writes(schema, namespace, base)
        self._note_memory(schema, namespace, base)
        self._note_numbers(schema, namespace, base)
        #: Positions and names of arguments that stay where they are indices, or sizes depend on them.
        self.routed_by = _routing_arguments(func)
        #: Nothing needs a look at each call where what it makes stays: from which state it draws does not matter then.
        self.is_plain_if_kept = not (
            self.written
            or self.written_names
            or self.is_uninitialised
            or self.reads_outside
            or self.is_collective
            or self.has_effects
            or self.hidden_writes
            or self.is_nondeterministic_on_cuda
            or self.nondeterministic_threads
            or self.reshapes_storage
        )
        #: Nothing needs one.
        self.is_plain = self.is_plain_if_kept and not (self.is_random or self.is_foreign)

    def _note_writes(self, schema: Any, namespace: str, base: str) -> None:
        """Take down what it writes to, and which results are no new bytes."""
        writes_nothing = namespace == "aten" and base in _WRITE_NOTHING
        writes = [
            (position, argument)
            for position, argument in enumerate(schema.arguments)
            if _is_write(argument) and not writes_nothing
        ]
        #: Positions of arguments that it writes to, and the names of those that are keywords.
        self.written = tuple(position for position, argument in writes if not argument.kwarg_only)
        self.written_names = tuple(argument.name for _, argument in writes if argument.kwarg_only)
        returns_alias = any(result.alias_info is not None for result in schema.returns)
        #: It makes no new bytes: what it returns are windows on its arguments.
        self.is_view = returns_alias and not writes and namespace == "aten"
        #: How many results it returns that are no aliases of arguments, a list as one; and whether that is one tensor.
        self.num_returned = sum(result.alias_info is None for result in schema.returns)
        self.makes_one = self.num_returned == 1 == len(schema.returns) and str(schema.returns[0].type) == "Tensor"
        self.overwrites = bool(writes) and namespace == "aten" and (base in _OVERWRITE or _is_out_variant(schema))
        #: Below a dispatch mode torch does not count the version of what these change up.
        self.forgets_versions = bool(writes) and base.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        self.hidden_writes = _HIDDEN_WRITES.get(schema.name)
        saved_name = _SAVED_BEFORE_WRITTEN.get(schema.name)
        #: Position of the argument that autograd saves before this operator writes to it, -1: none.
        self.saved_before_written = [a.name for a in schema.arguments].index(saved_name) if saved_name else -1

    def _note_memory(self, schema: Any, namespace: str, base: str) -> None:
        """Take down what it does to memory besides writing results, and to other processes."""
        self.is_uninitialised = namespace == "aten" and base in _UNINITIALISED
        self.reads_outside = namespace == "aten" and base in _READ_OUTSIDE
        self.reshapes_storage = namespace == "aten" and base in _RESHAPE_STORAGE
        #: Audits compare so many of its first results, None: all.
        self.num_compared = _NUM_COMPARED.get(schema.name)
        self.is_collective = namespace in COLLECTIVE_NAMESPACES
        self.is_repeatable = namespace == "_c10d_functional" and base in _REPEATABLE
        if self.is_repeatable:
            self.callee = _waited(self.callee)
        #: It does something besides what its schema says, and torch was told so.
        self.has_effects = torch_private.has_registered_effect(self.func)

    def _note_numbers(self, schema: Any, namespace: str, base: str) -> None:
        """Take down what its results depend on besides its arguments."""
        #: Not torch's own: may draw random numbers without saying so (Rule 3).
        self.is_foreign = namespace not in ("aten", "prims", "prim") and namespace not in COLLECTIVE_NAMESPACES
        self.is_random = torch.Tag.nondeterministic_seeded in self.func.tags
        #: The keyword that takes a `torch.Generator`, None if there is none.
        self.generator_name = next((a.name for a in schema.arguments if a.name == "generator"), None)
        #: Position of the argument without which it is deterministic, None if none makes it so.
        self.nondeterministic_flag = _NONDETERMINISTIC_ON_CUDA_IF.get(base) if namespace == "aten" else None
        self.is_nondeterministic_on_cuda = namespace == "aten" and (
            base in _NONDETERMINISTIC_ON_CUDA or self.nondeterministic_flag is not None
        )
        #: Number of threads from which on it is nondeterministic on the CPU, 0: never.
        self.nondeterministic_threads = _NONDETERMINISTIC_ON_CPU.get(base, 0) if namespace == "aten" else 0
        #: Each element of the result depends on one of each argument: not on how sums are formed (NOTE [ Settings ]).
        self.is_elementwise = not self.is_foreign and torch.Tag.pointwise in self.func.tags

    def writes_hidden(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the positions of arguments that this call writes to although its schema does not say so."""
        if self.hidden_writes is None:
            return ()
        positions, flag = self.hidden_writes
        writes = flag is None or args[flag]
        return tuple(p for p in positions if writes and isinstance(args[p], Tensor))

    @property
    def has_form_without_effect(self) -> bool:
        """Whether `without_effect` can be executed again."""
        return self.func._schema.name in _REPLAYED_WITHOUT_STATISTICS

    def without_effect(self, args: list[Any]) -> list[Any]:
        """Return arguments with which it computes the same results and writes nothing but them."""
        assert self.hidden_writes is not None
        return [None if position in self.hidden_writes[0] else arg for position, arg in enumerate(args)]


def _waited(callee: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a collective again: its results must be there for the steps that read them."""
    wait = torch_private.callee_of(torch.ops._c10d_functional.wait_tensor.default)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = callee(*args, **kwargs)
        return wait(result) if isinstance(result, Tensor) else [wait(each) for each in result]

    return call


def is_collective(name: str) -> bool:
    """Whether an operator of a name, as in `torch.ops`, talks to other processes."""
    return name.partition(".")[0] in COLLECTIVE_NAMESPACES


def _is_write(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _routing_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return positions and names of the arguments that say where data goes, or how much of it."""
    _, _, base = func._schema.name.partition("::")
    if base in _UNPOOLING:
        return ()
    tensors = [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if "Tensor" in str(argument.type) and not _is_write(argument)
    ]
    routing = _INDICES | {"mask"} if base in _SELECTED_BY_MASK else _INDICES
    named = tuple(found for found in tensors if found[1] in routing)
    return named or (tuple(tensors) if _DATA_DEPENDENT.intersection(func.tags) else ())


def _is_out_variant(schema: Any) -> bool:
    return "out" in schema.overload_name and any(_is_write(a) and a.kwarg_only for a in schema.arguments)


_known: dict[Any, Operator | HigherOrder] = {}


def operator_of(func: Any) -> Operator | HigherOrder:
    """Return what is known about an overload, or about what is called like one."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = (Operator if isinstance(func, torch._ops.OpOverload) else HigherOrder)(func)
    return found
