"""Which modules may draw random numbers: all but those of torch that are known not to.

Code of the user's own is read (reading.py). Where that is not enough, a class may promise the same:
``draws_nothing = True`` in its body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from stageline.capturing.streams.functions import DRAWING
from stageline.capturing.values import SIMPLE
from stageline.running.streams.reading import forward_draws_nothing, function_draws_nothing
from stageline.torch_private import tree_flatten

_PLAIN = (*SIMPLE, Tensor)  # what a function may be given without drawing by it

# Modules of torch.nn whose forward draws nothing. Their children answer for themselves.
_QUIET = """
    Module Sequential ModuleList ModuleDict ParameterList ParameterDict Identity Linear Bilinear
    Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Embedding EmbeddingBag
    BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm InstanceNorm1d InstanceNorm2d
    InstanceNorm3d LayerNorm GroupNorm RMSNorm LocalResponseNorm CrossMapLRN2d ReLU ReLU6 ELU
    SELU CELU GELU GLU SiLU Mish Sigmoid LogSigmoid Tanh Softmax Softmax2d LogSoftmax Softmin
    Softplus Softshrink Hardshrink Softsign Tanhshrink Threshold LeakyReLU PReLU Hardsigmoid
    Hardswish Hardtanh MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d LPPool1d
    LPPool2d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d
    AdaptiveMaxPool2d AdaptiveMaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d ZeroPad1d ZeroPad2d
    ZeroPad3d ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d
    ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d Flatten Unflatten Fold
    Unfold PixelShuffle PixelUnshuffle ChannelShuffle Upsample UpsamplingBilinear2d
    UpsamplingNearest2d CosineSimilarity PairwiseDistance LSTMCell GRUCell RNNCell
    TransformerEncoder TransformerDecoder Transformer NonDynamicallyQuantizableLinear L1Loss
    MSELoss CrossEntropyLoss NLLLoss PoissonNLLLoss GaussianNLLLoss KLDivLoss BCELoss
    BCEWithLogitsLoss HuberLoss SmoothL1Loss SoftMarginLoss MultiLabelSoftMarginLoss
    MarginRankingLoss HingeEmbeddingLoss CosineEmbeddingLoss TripletMarginLoss CTCLoss
"""

WRAPPERS = ("OptimizedModule", "DistributedDataParallel")
"""Modules that are put around a model and are no part of it, by name: importing them is slow."""

PROMISE = "draws_nothing"
"""The attribute of a class whose forward draws no random numbers; its children do not count."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _dropout(module: Any) -> bool:
    return bool(module.training and module.p > 0)


def _attention(module: Any) -> bool:
    return bool(module.training and module.dropout > 0)


def _recurrent(module: Any) -> bool:
    return bool(module.training and module.dropout > 0 and module.num_layers > 1)


def _training(module: Any) -> bool:
    return bool(module.training)


def _activation(module: Any) -> bool:
    """A layer of a Transformer takes any function as its activation."""
    return not isinstance(module.activation, nn.Module) and function_may_draw(module.activation)


_Question = Callable[[Any], bool]
_SOMETIMES: dict[type, _Question] = {
    nn.Dropout: _dropout,
    nn.Dropout1d: _dropout,
    nn.Dropout2d: _dropout,
    nn.Dropout3d: _dropout,
    nn.AlphaDropout: _dropout,
    nn.FeatureAlphaDropout: _dropout,
    nn.MultiheadAttention: _attention,
    nn.RNN: _recurrent,
    nn.LSTM: _recurrent,
    nn.GRU: _recurrent,
    nn.RReLU: _training,
    nn.TransformerEncoderLayer: _activation,
    nn.TransformerDecoderLayer: _activation,
}
_NEVER = frozenset(
    getattr(nn, name, None) or getattr(nn.modules.linear, name) for name in _QUIET.split()
)


@dataclass(frozen=True)
class Candidates:
    """What in a stage may draw.

    Attributes:
        unknown: Whether something is in it of which nothing is known.
        certain: Whether it has code of its own that draws.
        sometimes: Modules that draw in some states, each with the question for it.
        modules: All modules of the stage.
    """

    unknown: bool = False
    certain: bool = False
    sometimes: tuple[tuple[nn.Module, _Question], ...] = ()
    modules: tuple[nn.Module, ...] = ()

    def draws(self) -> bool:
        """Whether something is known to draw, as the modules stand now."""
        return self.certain or any(question(module) for module, question in self.sometimes)

    def may_draw(self) -> bool:
        """Whether something draws, or may."""
        return self.unknown or self.draws()

    @classmethod
    def among(cls, modules: Iterable[nn.Module], *, certain: bool = False) -> Candidates:
        """Look at modules, each for itself.

        Example:
            >>> quiet = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            >>> Candidates.among(quiet.modules()).may_draw()
            False
            >>> dropout = nn.Dropout(0.1)
            >>> found = Candidates.among([dropout])
            >>> found.may_draw(), dropout.eval() and found.may_draw()
            (True, False)
        """
        modules = tuple(modules)
        return cls(
            unknown=any(map(_is_unknown, modules)),
            certain=certain,
            sometimes=tuple((m, _SOMETIMES[type(m)]) for m in modules if type(m) in _SOMETIMES),
            modules=modules,
        )


def _is_unknown(module: nn.Module) -> bool:
    if type(module).__name__ in WRAPPERS:
        return False  # what they are around is looked at
    has_hooks = any(getattr(module, hooks) for hooks in _HOOKS)
    if has_hooks or "forward" in vars(module):
        return True
    if getattr(type(module), PROMISE, False) is True:
        return False
    is_known = type(module) in _NEVER or type(module) in _SOMETIMES
    return not is_known and not forward_draws_nothing(module)


def function_may_draw(function: Callable[..., Any] | None) -> bool:
    """Whether a function, or a module used as one, may draw.

    Example:
        >>> function_may_draw(F.cross_entropy), function_may_draw(lambda x, y: x.sum())
        (False, False)
        >>> function_may_draw(lambda x, y: F.dropout(x).sum())
        True
    """
    if function is None:
        return False
    if isinstance(function, partial):
        given = tree_flatten((function.args, function.keywords))[0]
        return not all(isinstance(x, _PLAIN) for x in given) or function_may_draw(function.func)
    if isinstance(function, nn.Module):
        return Candidates.among(function.modules()).may_draw()
    known: Any = getattr(F, getattr(function, "__name__", ""), None)
    if known is function:
        return known in DRAWING
    return not function_draws_nothing(function)
