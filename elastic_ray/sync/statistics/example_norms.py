"""Squared norms of single samples' gradients, measured in a model's layers during backward (torch).

Given a layer's input x and its output's gradient g, [samples, positions, features], the gradient of one sample b is

    linear        sum_t g[b,t] x[b,t]^T                     bias    sum_t g[b,t]
    normalising   sum_t g[b,t] x^[b,t], x^ normalised       bias    sum_t g[b,t]
    embedding     sum of g[b,t] over positions t of a word

Normalisation layers alone determine the noise up to a factor (Gray et al. 2024, arXiv 2411.00999). For each weight, a
pass computes the gradients of some columns, different each time, and extrapolates to all columns. Only the matching
part of x is kept, so that checkpointing still saves memory. Nothing is kept between steps. If the loss is a mean over B
samples, gradients carry a factor 1 / B: sum_b ||B g_b||^2 / B = B sum_b ||g_b||^2 is the mean squared norm of the
samples' own gradients, for K = B gradients in ``noise_scale.estimate``.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from elastic_ray.sync.device_numbers import as_real, read
from elastic_ray.sync.preconditioners import FlatPreconditioner

if TYPE_CHECKING:
    from elastic_ray.sync.operations.buckets import Bucket

LEAST_SEEN = 0.5
"""Share of the elements that layers measure at least; the others count as these."""

DENSE_STEPS = 16
"""First steps, all of which are measured."""

FRESH_STEPS, FRESH_SPACING = 32, 4
"""Steps after a change of the batch, one in how many of which is measured at least."""

MOST_SPACING = 64
SHARE_OF_TIME = 0.009
"""Of the time of training, what measured steps may cost by themselves; with their hooks' calls it is one percent."""

_FRESH = 1 / 8  # of the latest time in an average

MOST_PARTS = 32
"""One part in so many of a weight's columns is measured at a time."""

LEAST_COLUMNS = 16

Cut = Callable[[Tensor], Tensor]
"""Returns the measured part of a parameter, or of what the optimizer keeps of it."""

Scaled = Callable[[nn.Parameter, Cut], "Tensor | None"]
"""Returns the optimizer's factors for the measured part of a parameter; None for 1."""

BATCHED = 1 << 13
"""Most elements of a measured part whose factors are computed together with others': calls cost more than numbers."""

ATTENTION_NODES = 100
"""Nodes of autograd's graph among which that of an attention's projection is searched."""


class _Layer(abc.ABC):
    """Layer whose parameter gradients can be computed per sample.

    Args:
        params: Ids of the measured parameters.

    Attributes:
        features: Number of columns; each measurement covers some of them.
    """

    forwards: ClassVar[tuple[Any, ...]]  # classes with this very forward pass have such layers
    names: ClassVar[tuple[str, str]] = ("weight", "bias")

    def __init__(self, module: Any, params: set[int]) -> None:
        self.module = module
        own = (getattr(module, name, None) for name in self.names)
        self.weight, self.bias = (p if isinstance(p, nn.Parameter) and id(p) in params else None for p in own)
        self._is_first = False  # whether samples are known to be the first dimension

    @property
    @abc.abstractmethod
    def features(self) -> int:
        """Number of columns of the weight."""

    @abc.abstractmethod
    def leading(self, x: Tensor) -> Sequence[int]:
        """Return the sizes of the input's dimensions that are not features."""

    def cut(self, weight: Tensor, columns: slice) -> Tensor:
        """Return some columns of the weight or of its optimizer state."""
        return weight[:, columns]

    def watch(self, output: Any, see: Callable[[Tensor], None]) -> bool:
        """Register `see` to be called with the output's gradient during backward; False if it will have none."""
        if type(output) is not Tensor or not output.requires_grad:
            return False
        output.register_hook(see)  # type: ignore[no-untyped-call]
        return True

    @abc.abstractmethod
    def keep(self, x: Tensor, columns: slice) -> Tensor:
        """Return the part of the input needed for backward."""

    def ordered(self, kept: Tensor, g: Tensor) -> Tensor:
        """Return the gradient with samples along the first dimension."""
        return g

    @abc.abstractmethod
    def rows(self, kept: Tensor, g: Tensor, columns: slice, scaled: Scaled) -> Tensor:
        """Return each sample's gradients for the weight's columns, times the optimizer's factors, as one tensor."""

    @property
    def usable(self) -> bool:
        """True if the layer has parameters to measure."""
        return self.weight is not None or self.bias is not None

    def parts(self, x: Tensor | None, *, preconditioned: bool) -> int:
        """Return the number of parts that columns are divided into; each measurement covers one part."""
        return max(1, min(MOST_PARTS, self.features // LEAST_COLUMNS))

    def columns(self, number: int, parts: int) -> slice:
        """Return the columns covered by measurement ``number``."""
        part = number % parts
        return slice(part * self.features // parts, (part + 1) * self.features // parts)

    def has_samples_first(self, x: Tensor, samples: int) -> bool:
        """True if the input's first dimension is the samples; if that is ambiguous, an earlier input decides."""
        leading = self.leading(x)
        if not leading or leading[0] != samples:
            return False
        self._is_first = self._is_first or samples not in leading[1:]
        return self._is_first

    def bias_rows(self, g: Tensor) -> Tensor:
        """Return the bias gradient for each sample, [samples, features]."""
        return g if g.dim() == 2 else g.flatten(1, -2).sum(1)


def _wide(numbers: Tensor) -> Tensor:
    """Return the numbers in at least float32, because squares overflow in half precision."""
    return numbers.float() if numbers.dtype.itemsize < 4 else numbers


class _LinearLayer(_Layer):
    forwards: ClassVar[tuple[Any, ...]] = (nn.Linear.forward,)

    @property
    def features(self) -> int:
        return int(self.module.in_features)

    def leading(self, x: Tensor) -> Sequence[int]:
        return x.shape[:-1]

    def parts(self, x: Tensor | None, *, preconditioned: bool) -> int:
        whole = x is not None and x.dim() == 2 and not preconditioned  # which costs two norms a sample
        return 1 if whole else super().parts(x, preconditioned=preconditioned)

    def keep(self, x: Tensor, columns: slice) -> Tensor:
        return x if columns == slice(0, self.features) else x[..., columns].clone()

    def rows(self, kept: Tensor, g: Tensor, columns: slice, scaled: Scaled) -> Tensor:
        assert self.weight is not None, "it is measured"
        factors = scaled(self.weight, lambda p: self.cut(p, columns))
        if g.dim() == 2:  # the gradient is an outer product
            wide = _wide(g) if factors is None else g.to(factors.dtype)
            squares = wide.square().sum(1, True) if factors is None else wide.square() @ factors.square()
            return squares.sqrt() * kept
        found = kept.flatten(1, -2).to(g.dtype).transpose(1, 2) @ g.flatten(1, -2)
        return found if factors is None else found * factors.t()


class _AttentionLayer(_LinearLayer):
    """Projection of the input to queries, keys and values, if all three use the same tensor."""

    forwards = (nn.MultiheadAttention.forward,)
    names = ("in_proj_weight", "in_proj_bias")

    @property
    def features(self) -> int:
        return int(self.module.embed_dim)

    def leading(self, x: Tensor) -> Sequence[int]:
        return self._by_sample(x).shape[:2] if x.dim() == 3 else ()

    def _by_sample(self, x: Tensor) -> Tensor:
        return x if self.module.batch_first else x.transpose(0, 1)

    def keep(self, x: Tensor, columns: slice) -> Tensor:
        return self._by_sample(x)[..., columns].clone()

    def watch(self, output: Any, see: Callable[[Tensor], None]) -> bool:
        node = _node_with(self.weight, output[0].grad_fn) if self.weight is not None else None
        if node is not None:
            node.register_prehook(lambda grads: see(grads[0]) if grads[0] is not None else None)
        return node is not None

    def ordered(self, kept: Tensor, g: Tensor) -> Tensor:
        return g.reshape(kept.shape[1], len(kept), -1).transpose(0, 1)  # positions come first inside


class _NormLayer(_Layer):
    """LayerNorm, RMSNorm or GroupNorm layer; also BatchNorm if it uses running statistics."""

    forwards = (
        nn.LayerNorm.forward,
        nn.RMSNorm.forward,
        nn.GroupNorm.forward,
        nn.modules.batchnorm._BatchNorm.forward,
    )

    @property
    def features(self) -> int:
        return 1 if self.weight is None else self.weight.numel()

    def cut(self, weight: Tensor, columns: slice) -> Tensor:
        return weight.reshape(-1)[columns]

    @property
    def _is_last(self) -> bool:
        """True if features are the last dimensions rather than the second."""
        return isinstance(self.module, (nn.LayerNorm, nn.RMSNorm))

    def leading(self, x: Tensor) -> Sequence[int]:
        if isinstance(self.module, nn.modules.batchnorm._BatchNorm) and self.module.training:
            return ()
        return x.shape[: -len(self.module.normalized_shape)] if self._is_last else x.shape[:1]

    def _by_position(self, x: Tensor) -> Tensor:
        """Return the tensor with shape [samples, positions, features]."""
        if self._is_last:
            return x.reshape(len(x), -1, self.features)
        return x.flatten(2).transpose(1, 2) if x.dim() > 2 else x.unsqueeze(1)

    def keep(self, x: Tensor, columns: slice) -> Tensor:
        return self._by_position(self._normalised(_wide(x)))[..., columns].clone()

    def rows(self, kept: Tensor, g: Tensor, columns: slice, scaled: Scaled) -> Tensor:
        assert self.weight is not None, "it is measured"
        found = (self._by_position(g)[..., columns] * kept).sum(1)
        factors = scaled(self.weight, lambda p: self.cut(p, columns))
        return found if factors is None else found * factors

    def bias_rows(self, g: Tensor) -> Tensor:
        return self._by_position(g).sum(1)

    def _normalised(self, x: Tensor) -> Tensor:
        """Return the normalised input, before multiplication by the weight."""
        module = self.module
        if isinstance(module, nn.LayerNorm):
            return functional.layer_norm(x, module.normalized_shape, eps=module.eps)
        if isinstance(module, nn.RMSNorm):
            return functional.rms_norm(x, module.normalized_shape, eps=module.eps)
        if isinstance(module, nn.GroupNorm):
            return functional.group_norm(x, module.num_groups, eps=module.eps)
        return functional.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)


class _ConvLayer(_Layer):
    forwards = (nn.Conv2d.forward,)

    @property
    def usable(self) -> bool:
        m = self.module
        plain = m.groups == 1 and m.padding_mode == "zeros" and not isinstance(m.padding, str)
        return plain and super().usable

    @property
    def features(self) -> int:
        return int(self.module.in_channels)

    def leading(self, x: Tensor) -> Sequence[int]:
        return x.shape[:1] if x.dim() == 4 else ()

    def keep(self, x: Tensor, columns: slice) -> Tensor:
        return x[:, columns].clone()

    def rows(self, kept: Tensor, g: Tensor, columns: slice, scaled: Scaled) -> Tensor:
        assert self.weight is not None, "it is measured"
        m = self.module
        windows = functional.unfold(_wide(kept), m.kernel_size, dilation=m.dilation, padding=m.padding, stride=m.stride)
        found = _wide(g).flatten(2) @ windows.transpose(1, 2)
        factors = scaled(self.weight, lambda p: self.cut(p, columns))
        return found if factors is None else found * factors.flatten(1)

    def bias_rows(self, g: Tensor) -> Tensor:
        return g.flatten(2).sum(2)


class _EmbeddingLayer(_Layer):
    forwards = (nn.Embedding.forward,)

    @property
    def usable(self) -> bool:
        m = self.module
        return m.max_norm is None and not m.sparse and not m.scale_grad_by_freq and super().usable

    @property
    def features(self) -> int:
        return int(self.module.embedding_dim)

    def parts(self, x: Tensor | None, *, preconditioned: bool) -> int:
        return 1  # rare words are too different for a part to stand for all

    def leading(self, x: Tensor) -> Sequence[int]:
        return x.shape if x.dim() > 1 else ()  # one dimension may be positions that all samples have

    def keep(self, x: Tensor, columns: slice) -> Tensor:
        return x

    def rows(self, kept: Tensor, g: Tensor, columns: slice, scaled: Scaled) -> Tensor:
        assert self.weight is not None, "it is measured"
        words, each = kept.flatten(1), self.module.num_embeddings
        gradients = g[..., columns].flatten(0, -2)
        factors = scaled(self.weight, lambda p: self.cut(p, columns))
        if factors is not None:
            gradients = gradients * factors[words.flatten()]
        if self.module.padding_idx is not None:
            gradients = gradients * (words.flatten() != self.module.padding_idx).unsqueeze(1)
        samples = torch.arange(len(words), device=words.device).unsqueeze(1)
        order, places = (words + samples * each).flatten().sort()
        numbers = functional.pad((order[1:] != order[:-1]).cumsum(0), (1, 0))  # one for each word of a sample
        return torch.zeros_like(gradients).index_add_(0, numbers, gradients[places])


_KINDS: tuple[type[_Layer], ...] = (_LinearLayer, _AttentionLayer, _NormLayer, _ConvLayer, _EmbeddingLayer)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """Squared norms of single samples' gradients for some of a group's parameters, in the optimizer's units."""

    group: int
    whole: float  # of the gradient
    seen: float  # of its part that layers measure
    seen_examples: float  # of the samples' parts of that one, added up over the samples


class _LayerHook:
    """Hook on a layer's forward pass; in copies and pickles of the module, it does nothing."""

    def __init__(self, see: Callable[[_Layer, tuple[Any, ...], Any], None], layer: _Layer) -> None:
        self._see, self._layer = see, layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._see(self._layer, args, output)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _see_nothing


def _see_nothing(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Do nothing."""


class ExampleNorms:
    """Meter for the squared norms of single samples' gradients, measured in one model's layers.

    Hooks are registered on the layers only from :meth:`start` to :meth:`end`. Steps are measured as often as possible
    within one percent of the training time, but at least every 64 steps.

    Args:
        params: Trainable parameters of the model.
        every: Number of steps from one measurement to the next; None lets the meter choose.
        clock: Returns the time [s]; only differences are used.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        every: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        names = collections.Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        once = {id(p) for p in params if names[id(p)] == 1 and not p.is_complex() and type(p) is nn.Parameter}
        self._layers = _layers_of(module, once)
        self._mixing = [each for each in module.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
        mine = {id(p) for each in self._layers for p in (each.weight, each.bias) if p is not None}
        seen, elements = sum(p.numel() for p in params if id(p) in mine), sum(p.numel() for p in params)
        self.is_enough = seen >= LEAST_SEEN * elements and not self._mixes_samples
        self.every, self._clock = every, clock
        self._handles: list[Any] = []
        self._number = self._samples = 0
        self._buckets: list[tuple[Bucket, FlatPreconditioner | None]] = []
        self._factors: dict[int, FlatPreconditioner] = {}
        self._ready: dict[int, Tensor | None] = {}  # factors of small parts
        self._found: dict[int, Tensor | None] = {}
        self._next = self._changed_at = 0
        self._scale = 1.0
        self._seen_at: tuple[int, float] | None = None
        self._step_s = self._cost_s = self._spent_s = 0.0

    @property
    def _mixes_samples(self) -> bool:
        """True if any layer makes each sample's gradient depend on other samples."""
        return any(each.training for each in self._mixing)

    @property
    def on(self) -> bool:
        """True while a backward pass is being measured, from :meth:`start` to :meth:`end`."""
        return self._samples > 0

    @property
    def preconditioned(self) -> bool:
        """True if norms are in the optimizer's units (multiplied by its preconditioner)."""
        return bool(self._factors)

    def due(self, step: int, scale: float) -> bool:
        """True if the step after ``step`` committed steps is measured; ``scale`` is batch size / initial batch size."""
        if self.every is not None:
            return step % self.every == 0
        now_s, before = self._clock(), self._seen_at
        self._seen_at = step, now_s
        if before is not None and step == before[0] + 1:
            step_s = now_s - before[1]
            self._step_s = min(step_s, self._step_s + _FRESH * (step_s - self._step_s)) if self._step_s else step_s
        if scale != self._scale:
            self._scale, self._changed_at = scale, step
        fresh = step < self._changed_at + FRESH_STEPS and step % FRESH_SPACING == 0
        return step < DENSE_STEPS or fresh or step >= self._next

    def start(
        self, step: int, samples: int, buckets: Sequence[Bucket], preconditioner: Callable[[Bucket], Any]
    ) -> None:
        """Start measuring the next backward pass, over ``samples`` samples.

        Args:
            step: Number of committed steps.
            buckets: Buckets with all trainable parameters.
            preconditioner: Returns the optimizer's factors for a bucket; None if they are 1.
        """
        self.stop()
        since_s = self._clock()
        self._samples, self._number, self._next = samples, self._number + 1, step + self._spacing
        self._buckets = [(bucket, preconditioner(bucket)) for bucket in buckets]
        self._factors = {id(p): found for bucket, found in self._buckets if found is not None for p in bucket.params}
        if self._factors:
            self._prepare()
        self._handles = [
            each.module.register_forward_hook(_LayerHook(self._forward, each), prepend=True) for each in self._layers
        ]
        self._spent_s = self._clock() - since_s

    @property
    def _spacing(self) -> int:
        """Number of steps from one measurement to the next."""
        if not self._step_s:
            return 1
        return min(MOST_SPACING, max(1, math.ceil(self._cost_s / (SHARE_OF_TIME * self._step_s))))

    def stop(self) -> None:
        """Stop measuring and drop the results."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._samples, self._buckets = [], 0, []
        self._factors, self._found, self._ready = {}, {}, {}

    @torch.no_grad()
    def end(self) -> list[LayerNorms] | None:
        """End the measurement and return the norms; None if the layers have less than half of the parameters."""
        since_s, found, buckets = self._clock(), self._found, self._buckets
        self.stop()
        numbers, kinds = list[Tensor](), list[tuple[int, bool]]()
        elements = [0, 0]
        for bucket, factors in buckets:
            params = [p for p in bucket.params if p.grad is not None]
            grads: list[Any] = [p.grad for p in params]
            if any(grad.layout != torch.strided for grad in grads):
                return None
            for param, norm in zip(params, _squared_norms(params, grads, factors), strict=True):
                of_examples = found.get(id(param))
                elements[0] += param.numel()
                elements[1] += param.numel() if of_examples is not None else 0
                numbers += [norm] if of_examples is None else [norm, of_examples]
                kinds.append((bucket.group, of_examples is not None))
        if elements[1] < LEAST_SEEN * elements[0] or not elements[0] or self._mixes_samples:
            return None
        spent_s = self._spent_s + self._clock() - since_s  # without the wait for a GPU, which has its work to do anyway
        values = iter(read(numbers))
        norms = [_of_parameter(group, next(values), next(values) if seen else None) for group, seen in kinds]
        self._cost_s = min(spent_s, self._cost_s + _FRESH * (spent_s - self._cost_s)) if self._cost_s else spent_s
        return norms

    def _forward(self, layer: _Layer, args: tuple[Any, ...], output: Any) -> None:
        """Keep the part of a layer's input needed for backward."""
        since_s, x = self._clock(), args[0] if args else None
        if type(x) is Tensor and layer.has_samples_first(x, self._samples):
            parts = layer.parts(x, preconditioned=self.preconditioned)
            columns = layer.columns(self._number, parts)
            backward = functools.partial(self._backward, layer, self._number, parts, columns)
            if layer.watch(output, lambda g: backward(kept, g)):
                kept = layer.keep(x.detach(), columns)
        self._spent_s += self._clock() - since_s

    def _backward(self, layer: _Layer, number: int, parts: int, columns: slice, kept: Tensor, g: Tensor) -> None:
        """Add the norms for a layer's parameters once backward has computed its output's gradient."""
        if number != self._number or not self._samples:
            return
        since_s = self._clock()
        with torch.no_grad():
            g = layer.ordered(kept, g.detach())
            if layer.weight is not None and layer.weight.requires_grad:
                self._add(layer.weight, layer.rows(kept, g, columns, self._scaled), parts)
            if layer.bias is not None and layer.bias.requires_grad:
                rows, factors = layer.bias_rows(g), self._scaled(layer.bias, lambda p: p.reshape(-1))
                self._add(layer.bias, rows if factors is None else rows * factors, 1)
        self._spent_s += self._clock() - since_s

    def _scaled(self, param: nn.Parameter, cut: Cut) -> Tensor | None:
        if id(param) in self._ready:
            return self._ready[id(param)]
        factors = self._factors.get(id(param))
        return None if factors is None else factors.factors_of([(param, cut)])[0]

    def _prepare(self) -> None:
        """Compute the optimizer's factors for small parts in one batch."""
        parts: dict[int, list[tuple[nn.Parameter, Cut]]] = {}
        for layer in self._layers:
            columns = layer.columns(self._number, layer.parts(None, preconditioned=True))
            for param, cut in (
                (layer.weight, functools.partial(layer.cut, columns=columns)),
                (layer.bias, torch.ravel),
            ):
                if param is None or (factors := self._factors.get(id(param))) is None:
                    continue
                if cut(param.detach()).numel() <= BATCHED:
                    parts.setdefault(id(factors), []).append((param, cut))
        for found in parts.values():
            factors = self._factors[id(found[0][0])]
            self._ready |= zip((id(param) for param, _ in found), factors.factors_of(found), strict=True)

    def _add(self, param: nn.Parameter, rows: Tensor, times: int) -> None:
        flat = _wide(rows).reshape(-1)
        # A layer that is used twice has gradients of which only the sum is a sample's.
        self._found[id(param)] = None if id(param) in self._found else torch.dot(flat, flat) * times


def _node_with(weight: Tensor, last: Any) -> Any:
    """Return the autograd node before ``last`` that multiplies by this weight; None if not found."""
    nodes = collections.deque([last])
    for _ in range(ATTENTION_NODES):
        node = nodes.popleft() if nodes else None
        for found, _ in node.next_functions if node is not None else ():
            inner = found
            while inner is not None and inner.name() in ("TBackward0", "ToCopyBackward0"):
                inner = inner.next_functions[0][0]
            if inner is not found and getattr(inner, "variable", None) is weight:
                return node
            nodes.append(found)
    return None


def _squared_norms(params: Sequence[Any], grads: list[Any], factors: FlatPreconditioner | None) -> list[Tensor]:
    """Return each gradient's squared norm, in at least float32."""
    if factors is not None:
        return factors.squared_norms(params, grads)
    dtype = torch.promote_types(torch.float32, grads[0].dtype.to_real()) if grads else None
    return [norm.square() for norm in torch._foreach_norm([as_real(grad) for grad in grads], 2, dtype)] if grads else []


def _of_parameter(group: int, whole: float, of_examples: float | None) -> LayerNorms:
    seen = of_examples is not None
    return LayerNorms(group=group, whole=whole, seen=whole if seen else 0.0, seen_examples=of_examples or 0.0)


def _layers_of(module: nn.Module, params: set[int]) -> list[_Layer]:
    """Return the layers that can be measured; layers compiled by torch cannot."""
    marks = ("_compiled_call_impl", "_orig_mod")
    compiled = [each for each in module.modules() if any(getattr(each, mark, None) is not None for mark in marks)]
    hidden = {id(inner) for each in compiled for inner in each.modules()}
    found: list[_Layer] = []
    for each in module.modules():
        kind = next((k for k in _KINDS if type(each).forward in k.forwards), None)
        if kind is not None and id(each) not in hidden and (layer := kind(each, params)).usable:
            found.append(layer)
    return found
