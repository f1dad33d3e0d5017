"""Gradients in 16 bits on their way (torch)."""

from __future__ import annotations

import torch

_FORMS = {"native": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class WireForm:
    """Turns a flat buffer into what travels, and back.

    A value beyond fp16's 65504 becomes infinite, and so does the sum on every rank: AMP's scaler then leaves the step
    out and lowers its scale, as it does where autocast overflows.

    Args:
        dtype: that of ``Wire``: ``"native"``, ``"bf16"`` or ``"fp16"``.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = _FORMS[dtype]
        self._buffer: torch.Tensor | None = None

    def of(self, dtype: torch.dtype) -> torch.dtype:
        """The form in which gradients of a dtype travel: never a wider one."""
        return dtype if self._dtype is None or dtype.itemsize <= self._dtype.itemsize else self._dtype

    def pack(self, flat: torch.Tensor) -> torch.Tensor:
        """What travels: the buffer itself where its form is right, else one of this object's."""
        if self.of(flat.dtype) == flat.dtype:
            return flat
        if self._buffer is None or self._buffer.shape != flat.shape:
            self._buffer = torch.empty_like(flat, dtype=self._dtype)
        return self._buffer.copy_(flat)

    def unpack(self, flat: torch.Tensor) -> None:
        """What has arrived, back into the buffer."""
        if self._buffer is not None and self.of(flat.dtype) != flat.dtype:
            flat.copy_(self._buffer)

    def drop(self) -> None:
        """Leave the buffer to a collective that was given up and may still write to it."""
        self._buffer = None
