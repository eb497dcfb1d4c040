"""Which modules may draw random numbers: all but those of torch that are known not to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn import functional as F

from stageline.capturing.streams.functions import DRAWING

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
        always: Whether something is in it of which nothing is known.
        sometimes: Modules that draw in some states, each with the question for it.
    """

    always: bool
    sometimes: tuple[tuple[nn.Module, _Question], ...] = ()

    def may_draw(self) -> bool:
        """Whether the stage may draw as its modules stand now."""
        return self.always or any(question(module) for module, question in self.sometimes)

    @classmethod
    def among(cls, modules: Iterable[nn.Module]) -> Candidates:
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
        sometimes = []
        for module in modules:
            if any(getattr(module, hooks) for hooks in _HOOKS) or "forward" in vars(module):
                return cls(always=True)
            if type(module) in _SOMETIMES:
                sometimes.append((module, _SOMETIMES[type(module)]))
            elif type(module) not in _NEVER:
                return cls(always=True)
        return cls(always=False, sometimes=tuple(sometimes))


def function_may_draw(function: Callable[..., Any] | None) -> bool:
    """Whether a function, or a module used as one, may draw: all but torch's own may.

    Example:
        >>> function_may_draw(F.cross_entropy), function_may_draw(lambda x, y: x)
        (False, True)
    """
    if function is None:
        return False
    if isinstance(function, nn.Module):
        return Candidates.among(function.modules()).may_draw()
    known: Any = getattr(F, getattr(function, "__name__", ""), None)
    return known is not function or known in DRAWING
