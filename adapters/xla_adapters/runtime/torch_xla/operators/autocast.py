"""Autocast for the operators that torch_xla's lists leave out.

torch_xla 2.9 has autocast kernels for 70 operators, torch has them for 126 on CUDA and for 129 on the CPU. Among the
missing ones is `scaled_dot_product_attention`, which raises if rotary embeddings made queries and keys float32 and left
values bfloat16. The kernels here do what torch's do (aten/src/ATen/autocast_mode.h; "Autocast Op Reference" in torch's
documentation), where CUDA and the CPU differ as on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from xla_adapters.utils.nested_values import replaced, tensors_in

_KEY = "AutocastXLA"

# Computed in autocast's dtype.
_LOWER_PRECISION = (
    *("_convolution", "_convolution.deprecated", "convolution", "addmv", "addr", "mv", "chain_matmul"),
    *("linalg_multi_dot", "linalg_vecdot", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
    *("scaled_dot_product_attention", "_native_multi_head_attention", "_addmm_activation"),
)
# Computed in float32.
_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "pow.Scalar"),
    *("pow.Tensor_Tensor", "reciprocal", "rsqrt", "sinh", "softplus", "tan"),
    *("group_norm", "layer_norm", "native_layer_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
    *("cosine_similarity", "dist", "pdist", "renorm", "huber_loss", "poisson_nll_loss"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "max_pool3d", "max_unpool2d", "max_unpool3d"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "fake_quantize_per_tensor_affine", "polar", "view_as_complex"),
    *("quantile", "quantile.scalar", "nanquantile", "nanquantile.scalar", "stft", "stft.center"),
    *("fft_fft", "fft_fft2", "fft_fftn", "fft_ifft", "fft_ifft2", "fft_ifftn", "fft_rfft", "fft_rfft2", "fft_rfftn"),
    *("fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft", "fft_ihfft"),
    *("linalg_cholesky", "linalg_cholesky_ex", "linalg_cond", "linalg_cond.p_str", "linalg_eig", "linalg_eigh"),
    *("linalg_eigvals", "linalg_eigvalsh", "linalg_householder_product", "linalg_inv", "linalg_lstsq", "linalg_qr"),
    *("linalg_matrix_rank", "linalg_matrix_rank.atol_rtol_float", "linalg_matrix_rank.atol_rtol_tensor"),
    *("linalg_matrix_rank.tol_tensor", "linalg_solve", "linalg_svdvals", "linalg_tensorinv", "linalg_tensorsolve"),
    *("_lu_with_info", "geqrf", "lu_solve", "orgqr", "ormqr", "pinverse"),
)
# Results are float32, unless `dtype` is given.
_FLOAT32_RESULT = (
    *("cumprod", "cumprod.dimname", "cumsum", "cumsum.dimname", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    *("linalg_vector_norm", "sum", "sum.dim_IntList", "sum.dim_DimnameList"),
)
# The same; operator and the overload that takes a dtype.
_NORMS = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
}
# Computed in the widest dtype of the arguments.
_WIDEST = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "scatter_add"),
    *("grid_sampler_2d", "grid_sampler_3d", "tensordot"),
)

_Call = Callable[..., Any]
_library: Library | None = None


def complete_autocast() -> None:
    """Registers the kernels with torch's dispatcher, for the rest of the process.

    They act on tensors of the device under `torch.autocast("xla")` only, where torch_xla has none.
    """
    global _library
    if _library is not None:
        return
    _library = Library("aten", "IMPL")
    for names, kernel in (
        (_LOWER_PRECISION, _in_lower_precision),
        (_FLOAT32, _in_float32),
        (_FLOAT32_RESULT, _with_float32_result),
        (_WIDEST, _in_widest),
    ):
        for name in names:
            _library.impl(name, kernel(_operator(name)), _KEY)
    for name, with_dtype in _NORMS.items():
        _library.impl(name, _norm(_operator(name), _operator(with_dtype)), _KEY)


def _operator(name: str) -> _Call:
    packet, _, overload = name.partition(".")
    found: _Call = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


def _is_eligible(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "xla"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return replaced(values, lambda tensor: tensor.to(dtype) if _is_eligible(tensor) else tensor)


def _in_lower_precision(operator: _Call) -> _Call:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype("xla"))
            return operator(*args, **kwargs)

    return kernel


def _in_float32(operator: _Call) -> _Call:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            args, kwargs = _cast((args, kwargs), torch.float32)
            return operator(*args, **kwargs)

    return kernel


def _with_float32_result(operator: _Call) -> _Call:
    def kernel(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_eligible(input) and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        with torch._C._DisableAutocast():
            return operator(input, *args, **kwargs)

    return kernel


def _norm(operator: _Call, with_dtype: _Call) -> _Call:
    def kernel(input: torch.Tensor, p: Any = 2, *rest: Any) -> Any:
        with torch._C._DisableAutocast():
            if not _is_eligible(input):
                return operator(input, p, *rest)
            # The dispatcher leaves out arguments that have their default, which the other overload lacks: `keepdim`.
            return with_dtype(input, p, *rest, *([False] if len(rest) == 1 else []), dtype=torch.float32)

    return kernel


def _in_widest(operator: _Call) -> _Call:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        is_wide = any(_is_eligible(value) and value.dtype is torch.float32 for value in tensors_in((args, kwargs)))
        widest = torch.float32 if is_wide else torch.get_autocast_dtype("xla")
        with torch._C._DisableAutocast():
            args, kwargs = _cast((args, kwargs), widest)
            return operator(*args, **kwargs)

    return kernel
