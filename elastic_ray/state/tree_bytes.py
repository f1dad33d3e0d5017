"""A tree of tensors and plain values as bytes, and back; nothing is pickled."""

from __future__ import annotations

import math
from typing import Any

import torch

from elastic_ray.state.codec import decode, dtype_name, dtype_of, encode
from elastic_ray.state.tree import pack, unpack

_LENGTH_BYTES = 8


def to_bytes(tree: Any) -> bytes:
    """As bytes; tensors are copied to the CPU.

    Raises:
        NotPlainError: it holds something else than tensors and plain values.
    """
    skeleton, tensors = pack(tree)
    header = encode((encode(skeleton), [(tuple(tensor.shape), dtype_name(tensor.dtype)) for tensor in tensors]))
    parts = [len(header).to_bytes(_LENGTH_BYTES, "big"), header]
    parts += [tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return b"".join(parts)


def from_bytes(content: bytes) -> Any:
    """The inverse of :func:`to_bytes`; tensors are on the CPU, in memory of their own.

    Raises:
        ValueError: a peer has sent something else.
    """
    size = int.from_bytes(content[:_LENGTH_BYTES], "big")
    begin = _LENGTH_BYTES + size
    try:
        plain, told = decode(content[_LENGTH_BYTES:begin])
        tensors = []
        for shape, name in told:
            dtype = dtype_of(name)
            end = begin + math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or end > len(content):
                raise ValueError("a tensor is not all there")
            flat = torch.zeros(end - begin, dtype=torch.uint8)
            if end > begin:
                flat[:] = torch.frombuffer(bytearray(content[begin:end]), dtype=torch.uint8)
            tensors.append(flat.view(dtype).reshape(shape))
            begin = end
        if begin != len(content):
            raise ValueError("something is left")
        return unpack(decode(plain), tensors)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise ValueError(f"a peer has sent what is no value: {error}") from error


def on_device_of(tree: Any, own: Any) -> Any:
    """A tree whose tensors are where the tensors of ``own`` are."""
    device = next((tensor.device for tensor in pack(own)[1]), torch.device("cpu"))
    if device.type == "cpu":
        return tree
    skeleton, tensors = pack(tree)
    return unpack(skeleton, [tensor.to(device) for tensor in tensors])
