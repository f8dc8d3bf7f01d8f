"""Facts about operators that the recorder needs: read once from the schema, and from short tables."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actckpt._core import torch_private
from actckpt._core.ranks import COLLECTIVE_NAMESPACES
from actckpt._replay import direct

__all__ = ["Operator", "is_collective", "operator_of"]

#: Allocate without writing (NOTE [ Replay ], Rule 4).
_UNINITIALISED = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
        *("empty_quantized", "_empty_affine_quantized", "_empty_per_channel_affine_quantized"),
    }
)

#: Read bytes that no tensor holds, and that others may change.
_READ_OUTSIDE = frozenset({"from_file"})

#: Write every element of the tensor that they change, whatever it held.
_OVERWRITE = frozenset(
    {
        *("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_"),
        *("cauchy_", "log_normal_"),
    }
)

#: Declare a write in their schema but change no bytes.
_WRITE_NOTHING = frozenset({"record_stream"})

#: Change a storage itself, not only its contents: never replayed.
_RESHAPE_STORAGE = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})

#: Functional collectives that replay can repeat: NOTE [ Repeated collectives ].
_REPEATABLE = frozenset(
    {
        *("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast"),
        *("all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "all_reduce_coalesced"),
    }
)

#: Operators that write to arguments without declaring it (Rule 5): the positions of these arguments, and of the flag
#: that enables the write, None if there is none.
_HIDDEN_WRITES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "aten::native_batch_norm": ((3, 4), 5),
    "aten::cudnn_batch_norm": ((3, 4), 5),
    "aten::miopen_batch_norm": ((3, 4), 5),
    "aten::batch_norm": ((3, 4), 5),  # called in inference mode only, like the next one
    "aten::instance_norm": ((3, 4), 5),
    "aten::batch_norm_update_stats": ((1, 2), None),
    "aten::batch_norm_gather_stats": ((3, 4), None),
    "aten::batch_norm_gather_stats_with_counts": ((3, 4), None),
    # Dropout between layers draws from cuDNN's own state, which no generator has.
    "aten::_cudnn_rnn": ((15,), 11),
    "aten::miopen_rnn": ((13,), 9),
}

#: Autograd saves an argument before these write to it: the name of that argument. Backward must see what they wrote.
_SAVED_BEFORE_WRITTEN = {
    **dict.fromkeys(("aten::rrelu_with_noise", "aten::rrelu_with_noise_"), "noise"),
    **dict.fromkeys(("aten::_cudnn_rnn", "aten::miopen_rnn"), "dropout_state"),
}

#: How many of the first results audits compare, where not all. The remaining ones are workspaces for the operator's own
#: backward, which it need not fill, or seeds of a disabled dropout. Equal calls leave different bytes there.
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

#: Compute the same results without running statistics.
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

#: The same if the argument at this position is true. cuDNN runs transposed convolutions with gradient algorithms.
_NONDETERMINISTIC_ON_CUDA_IF = {"convolution": 6}


#: Operators that are nondeterministic on the CPU, from this number of threads on (Rule 5). Where an index occurs twice,
#: threads add with atomic operations, or the last writer wins. `linalg_lstsq` gives LAPACK uninitialised memory for its
#: pivots.
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


#: Argument names: integer tensors passed for them route data (`routing`).
_INDICES = frozenset({"index", "indices", "lengths", "offs", "offsets", "target", "targets"})
#: The same for masks.
_SELECTED_BY_MASK = frozenset({"masked_select", "masked_scatter", "masked_scatter_"})
#: Take the indices of a pooling operator.
_UNPOOLING = frozenset({"max_unpool2d", "max_unpool3d"})
#: The sizes of the results, or Python numbers, depend on tensor contents.
_DATA_DEPENDENT = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


class HigherOrder:
    """An operator whose arguments may be functions: not recorded (NOTE [ Replay ], Rule 8)."""

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
        #: The overload, without a Python frame around it.
        self.callee = torch_private.callee_of(func)
        #: As in `torch.ops.<name>`.
        self.name = str(func)
        #: A faster callable for positional arguments, None if there is none: NOTE [ Direct calls ].
        self.direct = direct.FUNCTIONS.get(self.name)
        #: A bit mask of the arguments that are tensors.
        self.tensor_positions = direct.tensor_positions(schema)
        self._note_writes(schema, namespace, base)
        self._note_memory(schema, namespace, base)
        self._note_numbers(schema, namespace, base)
        #: Positions and names of arguments that are kept if they are indices, or if sizes depend on them.
        self.routed_by = _routing_arguments(func)
        #: No per-call check is needed if its results are kept: the state that it draws from does not matter then.
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
        #: No per-call check is needed.
        self.is_plain = self.is_plain_if_kept and not (self.is_random or self.is_foreign)

    def _note_writes(self, schema: Any, namespace: str, base: str) -> None:
        """Set what it writes to, and which results are not new memory."""
        writes_nothing = namespace == "aten" and base in _WRITE_NOTHING
        writes = [
            (position, argument)
            for position, argument in enumerate(schema.arguments)
            if _is_write(argument) and not writes_nothing
        ]
        #: Positions of arguments that it writes to, and names of the keyword ones.
        self.written = tuple(position for position, argument in writes if not argument.kwarg_only)
        self.written_names = tuple(argument.name for _, argument in writes if argument.kwarg_only)
        returns_alias = any(result.alias_info is not None for result in schema.returns)
        #: Its results are views of its arguments.
        self.is_view = returns_alias and not writes and namespace == "aten"
        #: Number of results that are not aliases of arguments (a list is one), and whether that is one tensor.
        self.num_returned = sum(result.alias_info is None for result in schema.returns)
        self.makes_one = self.num_returned == 1 == len(schema.returns) and str(schema.returns[0].type) == "Tensor"
        self.overwrites = bool(writes) and namespace == "aten" and (base in _OVERWRITE or _is_out_variant(schema))
        #: Below a dispatch mode, torch does not increment the versions of tensors that these change.
        self.forgets_versions = bool(writes) and base.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        self.hidden_writes = _HIDDEN_WRITES.get(schema.name)
        saved_name = _SAVED_BEFORE_WRITTEN.get(schema.name)
        #: Position of the argument that autograd saves before this operator writes to it; -1: none.
        self.saved_before_written = [a.name for a in schema.arguments].index(saved_name) if saved_name else -1

    def _note_memory(self, schema: Any, namespace: str, base: str) -> None:
        """Set its effects on memory, besides writing results, and on other processes."""
        self.is_uninitialised = namespace == "aten" and base in _UNINITIALISED
        self.reads_outside = namespace == "aten" and base in _READ_OUTSIDE
        self.reshapes_storage = namespace == "aten" and base in _RESHAPE_STORAGE
        #: Audits compare this many of its first results; None: all.
        self.num_compared = _NUM_COMPARED.get(schema.name)
        self.is_collective = namespace in COLLECTIVE_NAMESPACES
        self.is_repeatable = namespace == "_c10d_functional" and base in _REPEATABLE
        if self.is_repeatable:
            self.callee = _waited(self.callee)
        #: It has a registered effect that its schema does not show.
        self.has_effects = torch_private.has_registered_effect(self.func)

    def _note_numbers(self, schema: Any, namespace: str, base: str) -> None:
        """Set what its results depend on besides its arguments."""
        #: Not one of torch's own: may draw random numbers without declaring it (Rule 3).
        self.is_foreign = namespace not in ("aten", "prims", "prim") and namespace not in COLLECTIVE_NAMESPACES
        self.is_random = torch.Tag.nondeterministic_seeded in self.func.tags
        #: The keyword that takes a `torch.Generator`, None if there is none.
        self.generator_name = next((a.name for a in schema.arguments if a.name == "generator"), None)
        #: Position of the argument that makes it nondeterministic if true, None if there is none.
        self.nondeterministic_flag = _NONDETERMINISTIC_ON_CUDA_IF.get(base) if namespace == "aten" else None
        self.is_nondeterministic_on_cuda = namespace == "aten" and (
            base in _NONDETERMINISTIC_ON_CUDA or self.nondeterministic_flag is not None
        )
        #: Number of threads from which on it is nondeterministic on the CPU; 0: never.
        self.nondeterministic_threads = _NONDETERMINISTIC_ON_CPU.get(base, 0) if namespace == "aten" else 0
        #: Each result element depends on one element per argument, so not on reduction order (NOTE [ Settings ]).
        self.is_elementwise = not self.is_foreign and torch.Tag.pointwise in self.func.tags

    def writes_hidden(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the positions of arguments that this call writes to without declaring it."""
        if self.hidden_writes is None:
            return ()
        positions, flag = self.hidden_writes
        writes = flag is None or args[flag]
        return tuple(p for p in positions if writes and isinstance(args[p], Tensor))

    @property
    def has_form_without_effect(self) -> bool:
        """Whether the form that `without_effect` returns can be replayed."""
        return self.func._schema.name in _REPLAYED_WITHOUT_STATISTICS

    def without_effect(self, args: list[Any]) -> list[Any]:
        """Return arguments with which it computes the same results and writes only them."""
        assert self.hidden_writes is not None
        return [None if position in self.hidden_writes[0] else arg for position, arg in enumerate(args)]


def _waited(callee: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable that runs a collective and waits: later steps read its results."""
    wait = torch_private.callee_of(torch.ops._c10d_functional.wait_tensor.default)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = callee(*args, **kwargs)
        return wait(result) if isinstance(result, Tensor) else [wait(tensor) for tensor in result]

    return call


def is_collective(name: str) -> bool:
    """Whether an operator, named as in `torch.ops`, communicates with other processes."""
    return name.partition(".")[0] in COLLECTIVE_NAMESPACES


def _is_write(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _routing_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return positions and names of the arguments that route data or determine its size."""
    _, _, base = func._schema.name.partition("::")
    if base in _UNPOOLING:
        return ()
    tensors = [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if "Tensor" in str(argument.type) and not _is_write(argument)
    ]
    routing = _INDICES | {"mask"} if base in _SELECTED_BY_MASK else _INDICES
    named = tuple(candidate for candidate in tensors if candidate[1] in routing)
    return named or (tuple(tensors) if _DATA_DEPENDENT.intersection(func.tags) else ())


def _is_out_variant(schema: Any) -> bool:
    return "out" in schema.overload_name and any(_is_write(a) and a.kwarg_only for a in schema.arguments)


_known: dict[Any, Operator | HigherOrder] = {}


def operator_of(func: Any) -> Operator | HigherOrder:
    """Return the facts about an overload, or about another callable that is dispatched like one."""
    operator = _known.get(func)
    if operator is None:
        operator = _known[func] = (Operator if isinstance(func, torch._ops.OpOverload) else HigherOrder)(func)
    return operator
