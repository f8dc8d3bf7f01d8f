"""Preset policies with one-word names: the operators whose results they keep. Imports no torch."""

__all__ = ["OTHER_NAMES", "PRESETS"]

#: Kernels of `scaled_dot_product_attention`, `flex_attention` and `varlen_attn`, and operators of flash-attn and
#: xFormers. Attention written as matmuls and softmax is not included.
_ATTENTION = (
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu"),
    *("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention"),
    *("aten._scaled_dot_product_fused_attention_overrideable", "aten._scaled_dot_product_attention_math_for_mps"),
    *("aten._flash_attention_forward", "aten._efficient_attention_forward", "aten._cudnn_attention_forward"),
    *("higher_order.flex_attention", "torch_attn._varlen_attn", "torch_attn._varlen_attn_out"),
    *("flash_attn._flash_attn_forward", "flash_attn._flash_attn_varlen_forward"),
    *("flash_attn_3._flash_attn_forward", "flash_attn_3.fwd"),
    *("xformers_flash.flash_fwd", "xformers_flash3.flash_fwd", "xformers.efficient_attention_forward_ck"),
)

#: Matrix products without batch dimensions, as Linear layers run them.
_DOTS = (
    *("aten.mm", "aten.addmm", "aten._addmm_activation", "aten.mv", "aten.addmv", "aten.dot", "aten.vdot"),
    *("aten.linear", "aten._int_mm", "aten._scaled_mm", "aten._scaled_mm_v2", "bitsandbytes.gemm_4bit"),
)
_BATCHED = (
    *("aten.bmm", "aten.baddbmm", "aten.addbmm", "aten._grouped_mm", "aten._scaled_grouped_mm"),
    "aten._scaled_grouped_mm_v2",
)
_CONVOLUTIONS = ("aten.convolution", "aten.conv_tbc")

#: By name, operators without their overloads; some are from packages that may not be installed.
PRESETS: dict[str, tuple[str, ...]] = {
    "attention": _ATTENTION,
    "matmuls": (*_DOTS, *_BATCHED, *_CONVOLUTIONS, *_ATTENTION),
    "dots_with_no_batch_dims": _DOTS,
}

#: Names that other libraries use, and ours.
OTHER_NAMES: dict[str, str] = {
    **dict.fromkeys(("full", "all", "always", "checkpoint", "drop", "recomputation", "uniform"), "recompute"),
    **dict.fromkeys(("none", "no", "never", "plain", "save", "store"), "keep"),
    **dict.fromkeys(("selective", "sac", "dots"), "matmuls"),
    **dict.fromkeys(("cpu", "disk", "host", "swap"), "offload"),
}
