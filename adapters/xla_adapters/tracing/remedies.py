"""`remedy_of`: what to call in a step in place of an operator that cannot be part of its graph."""

from __future__ import annotations

from collections.abc import Iterable

SEARCH_FOR_NAN = "torch.autograd.set_detect_anomaly, by which the backward reads each gradient, to look for NaN"
TENSOR_AS_RATE = "an update by a learning rate that is a tensor on the device, which torch reads"

_FFT = (
    "multiply by the matrix of the transform, for lengths up to a few thousand: angle = 2 * math.pi / n * "
    "torch.outer(torch.arange(n // 2 + 1), torch.arange(n)), made once; the real part of rfft(x) is x @ angle.cos().T, "
    "the imaginary part -(x @ angle.sin().T)"
)
_EIGH = (
    "for a symmetric matrix use torch.linalg.eigh, which the device has: values, vectors = torch.linalg.eigh(a); "
    "vectors * values.sqrt() is a root of it, (vectors / values) @ vectors.mT its inverse, values.log().sum() the "
    "logarithm of its determinant"
)
_PINV = "use torch.linalg.pinv, which the device has: torch.linalg.pinv(a) @ b"
_MASK = (
    "keep the shape: torch.where(mask, x, 0).sum() / mask.sum() in place of x[mask].mean(), "
    "F.cross_entropy(..., ignore_index=-100) in place of a choice of rows"
)
_POSITIONS = (
    "for a fixed number of positions: mask.flatten().long().argsort(descending=True, stable=True)[:k] are the first k "
    "that are set; to compute with all elements: torch.where(mask, x, 0)"
)
_UNIQUE = (
    "sort and compare neighbours, which keeps the shape: ordered = x.flatten().sort().values; "
    "(ordered[1:] != ordered[:-1]).sum() + 1 is how many there are"
)
_REPEAT = (
    "look the rows up, with a fixed number n of them: x[torch.searchsorted(repeats.cumsum(0), "
    "torch.arange(n, device=x.device), right=True)]"
)
_NMS = "call it after the step, with the boxes and scores that the step returns: how many it keeps depends on them"
_ROI_ALIGN = (
    "torchvision has it in torch's operators, too: torchvision.ops.roi_align._roi_align(input, rois, spatial_scale, "
    "height, width, sampling_ratio, aligned), where rois has the image's number before each box"
)

_ANOMALY = (
    "look for NaN in an eager run (xla_mode='eager'), or with torch.autograd.set_detect_anomaly(True, check_nan=False) "
    "have only the lines of errors told"
)
_RATE = (
    "give a number (lr=0.1): it is an input of the graph, so that a schedule changes it without a compile; or "
    "capturable=True, where the optimizer has it"
)

# By torch's name of the operator without its overload, or the name of the call.
_REMEDIES: dict[str, str] = {
    "_fft_r2c": _FFT,
    "_fft_c2c": _FFT,
    "_fft_c2r": _FFT,
    "linalg_cholesky_ex": _EIGH,
    "linalg_solve_triangular": _EIGH,
    "linalg_eig": _EIGH,
    "_linalg_solve_ex": _PINV,
    "linalg_inv": _PINV,
    "inverse": _PINV,
    "linalg_lstsq": _PINV,
    "_linalg_det": "use torch.linalg.svdvals(a).prod(dim=-1), which is the determinant without its sign",
    "multinomial": (
        "draw without replacement by the largest of perturbed logarithms: (probabilities.log() - "
        "torch.rand_like(probabilities).log().neg().log()).topk(k, -1).indices"
    ),
    "masked_select": _MASK,
    "a boolean index": _MASK,
    "to": (
        "move the tensor itself before the training (a parameter moves with its module: model.to(device)), or detach "
        "it if it needs no gradient"
    ),
    "nonzero": _POSITIONS,
    "torch.where with one argument": _POSITIONS,
    "unique": _UNIQUE,
    "unique_consecutive": _UNIQUE,
    "bincount": "F.one_hot(x, n).sum(0), with the number n of values",
    "one_hot": "give num_classes",
    "torchvision::nms": _NMS,
    "torchvision::roi_align": _ROI_ALIGN,
    "torchvision::_roi_align_backward": _ROI_ALIGN,
    SEARCH_FOR_NAN: _ANOMALY,
    TENSOR_AS_RATE: _RATE,
    "repeat_interleave": _REPEAT,
    "repeat_interleave without output_size": _REPEAT,
}


def remedy_of(operators: Iterable[str]) -> str | None:
    """What to call in place of the first of these operators that has an alternative; None if none has.

    Args:
        operators: names of torch's operators, or of calls.
    """
    names = (known for name in operators for known in (name, name.partition(".")[0]))
    return next((_REMEDIES[name] for name in names if name in _REMEDIES), None)
