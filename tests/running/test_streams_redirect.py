"""Redirected draws are torch's own: bit-equal to plain torch from the same generator state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stageline.capturing.streams.frames import Frame
from stageline.capturing.streams.functions import DRAWING
from stageline.capturing.streams.keys import ROOT, base_of, key_of, mix
from stageline.running.streams.calls import Inside, generator_untouched
from stageline.running.streams.stand_in import Seeded

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 6, 8, 8, generator=torch.Generator().manual_seed(0))
PROBABILITIES = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))


def _layer(make: Callable[[], nn.Module], x: Tensor = X) -> Callable[[], Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = make()

    def call() -> Tensor:
        out = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    return call


CASES: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X, 0.3),
    "dropout of a transposed tensor": lambda: F.dropout(X.transpose(0, 2), 0.3),
    "dropout of channels last": lambda: F.dropout(IMAGES.to(memory_format=torch.channels_last)),
    "dropout in place": lambda: F.dropout(X.clone(), 0.3, inplace=True),
    "dropout in bfloat16": lambda: F.dropout(X.bfloat16(), 0.3),
    "torch.dropout": lambda: torch.dropout(X, 0.3, train=True),
    "torch.dropout_": lambda: torch.dropout_(X.clone(), 0.3, True),
    "dropout of everything": lambda: F.dropout(X, 1.0),
    "dropout1d": lambda: F.dropout1d(X, 0.3),
    "dropout2d": lambda: F.dropout2d(IMAGES, 0.3),
    "dropout3d": lambda: F.dropout3d(IMAGES[None], 0.3),
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.3, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(X, 0.3, training=True),
    "rrelu": lambda: F.rrelu(X, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(IMAGES, 2, output_size=5),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.2),
    "causal attention": lambda: F.scaled_dot_product_attention(
        X, X, X, dropout_p=0.2, is_causal=True, scale=0.3
    ),
    "attention with a mask": lambda: F.scaled_dot_product_attention(
        X, X, X, PROBABILITIES[:, :1].expand(4, 6)[:, None], dropout_p=0.2
    ),
    "attention with a mask of bools": lambda: F.scaled_dot_product_attention(
        X, X, X, X[..., :6] > -1, 0.2
    ),
    "attention in bfloat16": lambda: F.scaled_dot_product_attention(
        X.bfloat16(), X.bfloat16(), X.bfloat16(), dropout_p=0.2
    ),
    "attention in groups": lambda: F.scaled_dot_product_attention(
        IMAGES, IMAGES[:, :2], IMAGES[:, :2], dropout_p=0.2, enable_gqa=True
    ),
    "MultiheadAttention": _layer(lambda: nn.MultiheadAttention(8, 2, dropout=0.2)),
    "TransformerEncoderLayer": _layer(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)),
    "LSTM": _layer(lambda: nn.LSTM(8, 8, num_layers=3, dropout=0.2)),
    "GRU": _layer(lambda: nn.GRU(8, 8, num_layers=2, dropout=0.2, bidirectional=True)),
    "RNN": _layer(lambda: nn.RNN(8, 8, num_layers=2, dropout=0.2)),
    "rand": lambda: torch.rand(3, 4),
    "rand in float64": lambda: torch.rand(3, 4, dtype=torch.float64),
    "rand_like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(3, 4),
    "many randn": lambda: torch.randn(1000),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(10, (5,)),
    "randint with bounds": lambda: torch.randint(3, 10, (5,)),
    "randint_like": lambda: torch.randint_like(X, 10),
    "randperm": lambda: torch.randperm(20),
    "normal": lambda: torch.normal(X, 0.5),
    "normal of a size": lambda: torch.normal(1.0, 2.0, (3, 4)),
    "bernoulli": lambda: torch.bernoulli(PROBABILITIES),
    "x.bernoulli": lambda: PROBABILITIES.bernoulli(0.3),
    "bernoulli_": lambda: torch.empty(30).bernoulli_(0.3),
    "multinomial": lambda: torch.multinomial(PROBABILITIES, 3),
    "poisson": lambda: torch.poisson(PROBABILITIES * 5),
    "binomial": lambda: torch.binomial(torch.full((4, 6), 9.0), PROBABILITIES),
    "uniform_": lambda: torch.empty(9).uniform_(-1, 2),
    "normal_": lambda: torch.empty(9).normal_(),
    "exponential_": lambda: torch.empty(9).exponential_(),
    "geometric_": lambda: torch.empty(9).geometric_(0.4),
    "log_normal_": lambda: torch.empty(9).log_normal_(),
    "cauchy_": lambda: torch.empty(9).cauchy_(),
    "random_": lambda: torch.empty(9).random_(1000),
    "Gamma": lambda: torch.distributions.Gamma(PROBABILITIES + 1, 1.0).rsample(),
    "Dirichlet": lambda: torch.distributions.Dirichlet(PROBABILITIES + 1).rsample(),
    "Categorical": lambda: torch.distributions.Categorical(PROBABILITIES).sample(),
    "nn.init.normal_": lambda: nn.init.normal_(torch.empty(3, 4)),
    "nn.init.xavier_uniform_": lambda: nn.init.xavier_uniform_(torch.empty(3, 4)),
    "nn.init.kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(3, 4)),
    "nn.init.trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(3, 4)),
    "nn.init.orthogonal_": lambda: nn.init.orthogonal_(torch.empty(4, 4)),
    "svd_lowrank": lambda: torch.svd_lowrank(X[0], q=2)[1],
    "the default generator, named": lambda: torch.rand(4, generator=torch.default_generator),
}


def _seeded(call: Callable[[], Tensor]) -> Tensor:
    """Call with all draws redirected to one generator that is seeded once."""
    frame = Frame.at(ROOT)
    frame.seeded = Seeded(9)
    with Inside({}, frame, base=0):
        return call()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["grad", "no grad", "inference"])
def test_a_redirected_draw_is_torchs_own(name: str, mode: str) -> None:
    call = CASES[name]
    around = {"grad": torch.enable_grad, "no grad": torch.no_grad}.get(mode, torch.inference_mode)
    with around():
        with generator_untouched():
            got = _seeded(call)
        before = torch.get_rng_state()
        torch.manual_seed(9)
        try:
            wanted = call()
        finally:
            torch.set_rng_state(before)
        assert torch.equal(got, wanted)
        assert got.stride() == wanted.stride()


def test_the_gradients_of_an_attention_are_torchs_own() -> None:
    inputs = [X.clone().requires_grad_() for _ in range(3)]

    def call() -> Tensor:
        query, key, value = inputs
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.3, is_causal=True)

    got = torch.autograd.grad(_seeded(call).square().sum(), inputs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        wanted = torch.autograd.grad(call().square().sum(), inputs)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
def test_dropout_by_key_keeps_as_many_as_it_should(dtype: torch.dtype, p: float) -> None:
    """On the CPU a float is drawn for each element, which is faster than what torch does."""
    given = torch.randn(400, 500).to(dtype) + 8  # nothing is zero before
    with Inside({}, Frame.at(ROOT), 1), generator_untouched():
        dropped = F.dropout(given, p)
    kept = dropped != 0
    assert kept.double().mean().item() == pytest.approx(1 - p, abs=0.005)
    factor = torch.ones((), dtype=dtype).div_(1 - p)
    assert torch.equal(dropped, torch.where(kept, given * factor, 0))
    rows = kept.double().mean(1)
    assert rows.std().item() == pytest.approx((p * (1 - p) / 500) ** 0.5, rel=0.2)


@pytest.mark.parametrize("name", [name for name in CASES if name != "dropout of everything"])
def test_the_key_decides(name: str) -> None:
    def at(base: int) -> Tensor:
        with Inside({}, Frame.at(ROOT), base), torch.no_grad():
            return CASES[name]()

    with generator_untouched():
        assert torch.equal(at(1), at(1))
        # Few of so many numbers, or one bit of each: another key may give the same.
        assert any(not torch.equal(at(1), at(base)) for base in range(2, 8))


def test_a_generator_of_the_codes_own_is_left_alone() -> None:
    own = torch.Generator().manual_seed(4)
    with Inside({}, Frame.at(ROOT), 1):
        got = torch.rand(3, generator=own), torch.empty(3).normal_(generator=own)
    own.manual_seed(4)
    assert torch.equal(got[0], torch.rand(3, generator=own))
    assert torch.equal(got[1], torch.empty(3).normal_(generator=own))


def test_draws_of_one_place_differ_and_nothing_depends_on_what_came_before_elsewhere() -> None:
    with Inside({}, Frame.at(ROOT), 1):
        one, two = torch.rand(5), torch.rand(5)
    with Inside({}, Frame.at(ROOT), 1):
        F.dropout(X, 0.5, training=False)  # counts as a draw, so train and eval count alike
        again = torch.rand(5)
    assert not torch.equal(one, two)
    assert torch.equal(two, again)


def test_every_operation_that_torch_marks_as_random_is_known() -> None:
    """A new one in another release of torch must be looked at."""
    on_other_devices = ("cudnn", "mps", "miopen", "efficient", "flash", "triton", "mem_eff")
    missing = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not hasattr(packet, "overloads") or any(word in name for word in on_other_devices):
            continue
        tags = [getattr(packet, overload).tags for overload in packet.overloads()]
        if not any(torch.Tag.nondeterministic_seeded in each for each in tags):
            continue
        places = (torch, Tensor, torch._C._nn)
        public = [getattr(place, name) for place in places if hasattr(place, name)]
        missing += [name for function in public if function not in DRAWING]
    assert set(missing) <= {"_fused_sdp_choice", "_nested_tensor_softmax_with_shape"}


def test_keys_spread_over_32_bits() -> None:
    bases = [
        base_of(seed, 0, step, mb) for seed in range(4) for step in range(8) for mb in range(8)
    ]
    keys = {key_of(base, mix(ROOT, draw), 1) for base in bases for draw in range(32)}
    assert len(keys) >= len(bases) * 32 - 2  # by chance two of 8192 may meet
    for bit in range(32):
        share = sum(key >> bit & 1 for key in keys) / len(keys)
        assert 0.47 < share < 0.53
