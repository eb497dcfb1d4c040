"""torchgpipe's own public names: one script, with another first word in its imports."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.compat.torchgpipe import GPipe, is_recomputing
from tests.compat.loops import differences, plain

SCRIPT = """
from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.balance import balance_by_size, balance_by_time
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.checkpoint import is_checkpointing as same
from torchgpipe.gpipe import verify_module
from torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from torchgpipe.skip.namespace import Namespace
from torchgpipe.skip.skippable import Skippable

assert issubclass(skippable(stash=["x"])(nn.Linear), Skippable)  # the function, not the module
sample = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
verify_module(model)
verify_skippables(model)
balance = balance_by_time(2, model, sample, timeout=0, device="cpu")
assert sum(balance) == sum(balance_by_size(2, model, sample, device="cpu")) == 4

model = GPipe(model, balance, devices=["cpu", "cpu"], chunks=4, deferred_batch_norm=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
target = torch.randint(4, (64,))
losses = []
for _ in range(10):
    loss = functional.cross_entropy(model(sample), target.to(model.devices[-1]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def test_a_script_of_torchgpipe_runs(one_thread: None) -> None:
    torch.manual_seed(0)
    names = {"torch": torch, "nn": nn, "functional": functional}
    exec(SCRIPT.replace("from torchgpipe", "from stageline.compat.torchgpipe"), names)
    losses = names["losses"]
    assert isinstance(losses, list)
    assert losses[-1] < losses[0]


def test_gpipe_computes_what_the_plain_model_does(one_thread: None) -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), [2, 1], chunks=3)
    twin = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    pipe.load_state_dict(twin.state_dict())
    x = torch.randn(8, 4)
    output, wanted = pipe(x), plain(twin, x, 3)
    assert torch.equal(output, wanted)
    output.square().sum().backward()
    wanted.square().sum().backward()
    assert list(differences(pipe, twin)) == []


def test_a_layer_may_count_what_is_no_recomputation() -> None:
    """The counter of torchgpipe's user guide."""

    class Counter(nn.Module):
        counter = 0

        def forward(self, x: Tensor) -> Tensor:
            if not is_recomputing():
                self.counter += 1
            return x

    layer = Counter()
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), layer), [1, 1], chunks=4, checkpoint="always")
    pipe(torch.randn(8, 2)).sum().backward()
    assert layer.counter == 4


def test_a_wrong_model_is_refused() -> None:
    shared = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"module must be nn.Sequential to be partitioned"):
        GPipe(shared, [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        GPipe(nn.Sequential(shared, shared), [1, 1])
