"""The microbatch contract: what is split, and how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.running.microbatches import Microbatches
from stageline.running.sizes import split_sizes
from tests.running.batches import Pair, cut, rows

pytestmark = pytest.mark.usefixtures("one_thread")


# Sizes


def test_sizes_are_those_of_tensor_split() -> None:
    for n in range(1, 30):
        for m in range(1, 12):
            parts = torch.tensor_split(torch.arange(n), min(n, m))
            batch = cut(rows(n), count=m)
            assert batch.sizes == [len(part) for part in parts] == split_sizes(n, min(n, m))
            assert batch.count == min(n, m)
            assert batch.rows == n


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_slices_are_those_of_tensor_split_along_any_dimension(dim: int) -> None:
    x = rows(5, 6, 7).transpose(0, 2)  # not contiguous
    batch = cut(x, count=4, dims=dim)
    for index, want in enumerate(torch.tensor_split(x, 4, dim)):
        (part,), _ = batch.inputs(index)
        assert torch.equal(part, want)
        assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()  # no copy


# Which leaves


def test_every_leaf_of_every_tree_is_split() -> None:
    batch = cut(
        rows(4),
        [rows(4), {"deep": rows(4)}],
        target=Pair(rows(4), (rows(4),)),
        mask=rows(4),
        count=2,
    )
    part = batch.part(1)
    want = rows(4)[2:]
    assert torch.equal(part.args[0], want)
    assert torch.equal(part.args[1][0], want)
    assert torch.equal(part.args[1][1]["deep"], want)
    assert torch.equal(part.kwargs["mask"], want)
    assert isinstance(part.target, Pair)
    assert torch.equal(part.target.left, want)
    assert torch.equal(part.target.right[0], want)
    assert part.rows == 2


def test_plain_values_and_scalars_go_whole() -> None:
    temperature = torch.tensor(0.5)
    plain = (3, 2.5, True, None, "text", np.float32(1.5))
    batch = cut(rows(4), temperature, *plain, target=None, count=2)
    for index in range(2):
        args, _ = batch.inputs(index)
        assert args[1] is temperature
        assert args[2:] == plain
        assert batch.target(index) is None


def test_replicated_leaves_go_whole_and_without_their_mark() -> None:
    table, tree = rows(4), {"a": rows(3), "b": [rows(4), 7]}
    batch = cut(rows(4), sl.replicate(table), count=2, tree=sl.replicate(tree))
    for index in range(2):
        args, kwargs = batch.inputs(index)
        assert args[1] is table
        assert kwargs["tree"] is tree


def test_a_sparse_tensor_goes_whole_or_is_refused() -> None:
    """It was torch that failed, with two pages about a backend."""
    sparse = torch.eye(4).to_sparse()
    assert cut(rows(4), sl.replicate(sparse), count=2).inputs(0)[0][1] is sparse
    with pytest.raises(sl.BatchError, match=r"args\[1\] is a tensor of layout torch.sparse_coo"):
        cut(rows(4), sparse, count=2)


def test_a_replicated_target_goes_whole() -> None:
    target = {"prototypes": sl.replicate(rows(9)), "labels": rows(4)}
    batch = cut(rows(4), target=target, count=2)
    assert batch.target(1)["prototypes"] is target["prototypes"].value
    assert torch.equal(batch.target(1)["labels"], rows(4)[2:])


def test_replicating_twice_is_replicating() -> None:
    mark = sl.replicate(rows(2))
    assert sl.replicate(mark) is mark


def test_a_mark_inside_a_mark_is_removed_too() -> None:
    inner = rows(3)
    batch = cut(rows(2), sl.replicate({"inner": sl.replicate(inner)}))
    assert batch.inputs(0)[0][1]["inner"] is inner


def test_the_whole_batch_has_no_marks() -> None:
    x, table = rows(4), rows(9)
    whole = cut(x, table=sl.replicate(table), target=x).whole
    assert whole.args == (x,)
    assert whole.kwargs == {"table": table}
    assert whole.target is x
    assert whole.rows == 4


# batch_dims


def test_dimensions_by_leaf_name() -> None:
    x, mask, table = rows(4, 3), rows(3, 4), rows(1, 3)
    dims = {"args[1]": 1, "kwargs['table']": None, "target.left[0]": -1}
    batch = cut(x, mask, target=Pair([rows(2, 4)], 0), count=2, dims=dims, table=table)
    args, kwargs = batch.inputs(1)
    assert torch.equal(args[0], x[2:])
    assert torch.equal(args[1], mask[:, 2:])
    assert kwargs["table"] is table
    assert torch.equal(batch.target(1).left[0], rows(2, 4)[:, 2:])


def test_a_leaf_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(sl.BatchError) as caught:
        cut(rows(4), mask=rows(4), dims={"arg[0]": 1, "kwargs['mask']": 0})
    message = str(caught.value)
    assert "batch_dims names 'arg[0]'" in message
    assert "args[0], kwargs['mask']" in message


@pytest.mark.parametrize("dim", [1, -2])
def test_a_dimension_that_a_leaf_does_not_have(dim: int) -> None:
    with pytest.raises(
        sl.BatchError, match=rf"target has shape \(4,\).* no dimension {dim} .*batch"
    ):
        cut(rows(4, 4), target=rows(4), dims=dim)


# What cannot be split


def test_disagreement_names_both_leaves_and_the_ways_out() -> None:
    with pytest.raises(sl.BatchError) as caught:
        cut(rows(6), extra={"positions": rows(1, 5)})
    message = str(caught.value)
    for part in (
        "kwargs['extra']['positions'] has 1 rows in dimension 0 (shape (1, 5))",
        "args[0] says the batch has 6",
        "sl.replicate(...)",
        "batch_dims={\"kwargs['extra']['positions']\": ...}",
    ):
        assert part in message


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(sl.BatchError, match=r"args\[0\] says the batch has 0 rows: skip"):
        cut(rows(0, 3))


def test_a_numpy_array_is_refused_by_name() -> None:
    with pytest.raises(sl.BatchError, match=r"target\['y'\] is a numpy array: pass torch.from_num"):
        cut(rows(4), target={"y": np.zeros(4)})


def test_a_batch_without_a_batch_dimension_is_refused() -> None:
    with pytest.raises(sl.BatchError, match=r"at least one tensor .* got Tensor, int, NoneType"):
        cut(torch.tensor(1.0), 3)


# In a pipeline


class Shift(nn.Module):
    """A first stage with arguments of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, positions: Tensor, *, mask: Tensor, scale: float = 1.0) -> Any:
        assert positions.shape == (1, 3)
        assert mask.shape == (3, len(x))
        return self.linear(x + positions) * mask.t() * scale, len(x)


def test_arguments_of_all_sorts_reach_the_first_stage() -> None:
    torch.manual_seed(0)
    first, last = Shift(), nn.Linear(3, 2).requires_grad_(False)
    pipe = sl.Pipeline.from_stages(
        [first, lambda pair: {"y": last(pair[0]), "n": pair[1]}],
        num_microbatches=2,
        batch_dims={"kwargs['mask']": 1},
    ).eval()
    x, positions, mask = torch.randn(5, 3), torch.randn(1, 3), torch.randn(3, 5)
    out = pipe(x, sl.replicate(positions), mask=mask, scale=2.0)
    want = [
        last(first(x[a:b], positions, mask=mask[:, a:b], scale=2.0)[0]) for a, b in ((0, 3), (3, 5))
    ]
    assert torch.equal(out["y"], torch.cat(want))
    assert isinstance(out["n"], sl.PerMicrobatch)
    assert out["n"] == [3, 2]


def test_a_batch_first_in_the_second_dimension() -> None:
    """[time, batch, feature] all the way through, with one number for everything."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    pipe = sl.Pipeline(model, split=2, num_microbatches=3, batch_dims=1).eval()
    x = torch.randn(6, 7, 3)
    want = torch.cat([model(part) for part in x.tensor_split(3, 1)], 1)
    assert torch.equal(pipe(x), want)


def test_target_dimensions_do_not_stand_in_the_way_of_inference() -> None:
    """A call has no target; that batch_dims names a leaf of it must not matter there."""
    pipe = sl.Pipeline(
        nn.Sequential(nn.Linear(2, 2)),
        split=1,
        num_microbatches=2,
        loss_fn=lambda out, target: nn.functional.mse_loss(out, target["y"].t()),
        batch_dims={"target['y']": 1},
    )
    pipe.step(rows(4, 2), target={"y": rows(2, 4)})
    assert pipe.eval()(rows(4, 2)).shape == (4, 2)


# Bad calls


def plain_pipe() -> sl.Pipeline:
    return sl.Pipeline(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        split=2,
        num_microbatches=2,
        loss_fn=nn.functional.mse_loss,
    )


@pytest.mark.parametrize("args", [(), (None,), (3, "text")])
def test_a_step_without_a_tensor_says_who_needs_one(args: tuple[Any, ...]) -> None:
    with pytest.raises(sl.BatchError, match=r"rank 0 holds stage 0 .* pass the batch, step\(x"):
        plain_pipe().step(*args, target=rows(4, 2))


def test_a_step_with_an_array_says_how_to_turn_it_into_a_tensor() -> None:
    with pytest.raises(sl.BatchError, match=r"args\[0\] is a numpy array: pass torch.from_numpy"):
        plain_pipe().step(np.zeros((4, 2), dtype=np.float32), target=rows(4, 2))


def test_arguments_that_all_go_whole_leave_the_batch_to_the_target() -> None:
    pipe = sl.Pipeline.from_stages(
        [nn.Linear(2, 2)], num_microbatches=2, loss_fn=lambda out, target: (out - target).sum()
    )
    assert pipe.step(sl.replicate(rows(1, 2)), target=rows(4, 2)).num_microbatches == 2


def test_a_batch_with_a_graph_behind_it_is_refused() -> None:
    x = rows(4, 2).requires_grad_()
    with pytest.raises(
        sl.BatchError, match=r"graph behind it \(Mul.* pass it detached, or use out"
    ):
        plain_pipe().step(x * 2, target=rows(4, 2))


@pytest.mark.parametrize("wrap", [sl.replicate, lambda leaf: sl.replicate({"leaf": leaf})])
def test_a_replicated_argument_with_a_graph_behind_it_is_refused_too(wrap: Any) -> None:
    """Else the second microbatch fails with torch's 'backward through the graph a second time'."""
    weight = torch.ones(2, requires_grad=True)
    pipe = sl.Pipeline.from_stages(
        [lambda x, w: x * (w["leaf"] if isinstance(w, dict) else w), nn.Linear(2, 2)],
        num_microbatches=2,
        loss_fn=nn.functional.mse_loss,
    )
    with pytest.raises(sl.BatchError, match="graph behind it"):
        pipe.step(rows(4, 2), wrap(weight.exp()), target=rows(4, 2))


class Tagged(Tensor):
    """A tensor of another class."""


ALIKE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a tensor": ((torch.ones(8, 3),), {}),
    "of other strides": ((torch.ones(3, 8).T,), {}),
    "stretched": ((torch.ones(1, 3).expand(8, 3),), {}),
    "a parameter": ((nn.Parameter(torch.ones(8, 3)), torch.ones(8)), {}),
    "with plain values": ((torch.ones(8), None, 2.5, "a"), {"flag": True, "n": 3}),
    "with what goes whole": ((torch.ones(8), torch.tensor(2)), {"p": sl.replicate(torch.ones(8))}),
    "one tensor twice": ((_ONE := torch.ones(8), _ONE), {"p": sl.replicate(_ONE)}),
}


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("name", ALIKE)
def test_inputs_of_one_size_look_alike(name: str, is_ahead: bool) -> None:
    args, kwargs = ALIKE[name]
    batch = Microbatches(args, kwargs, None, num_microbatches=3)
    if is_ahead:
        batch.slice_ahead(inputs=True, targets=False)
    assert batch.inputs_look_alike
    assert batch.sizes == [3, 3, 2]
    first, second, last = ([*a, *k.values()] for a, k in map(batch.inputs, range(3)))
    assert _looks(first) == _looks(second)
    assert _looks(second) != _looks(last)


def _looks(leaves: list[Any]) -> list[Any]:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [
        [(type(t), t.dtype, t.shape, t.stride(), t.requires_grad, t.device) for t in tensors],
        [[one is other for one in tensors] for other in tensors],
        [id(leaf) for leaf in leaves if not isinstance(leaf, Tensor)],
    ]


@pytest.mark.parametrize(
    "argument",
    [
        torch.ones(8, 3).as_subclass(Tagged),
        [torch.ones(8)],
        {"x": torch.ones(8)},
        sl.replicate([1, 2]),
        sl.replicate(torch.ones(8).to_sparse()),
        torch.float32,
    ],
)
def test_inputs_that_may_be_anything_are_not_said_to_look_alike(argument: Any) -> None:
    batch = Microbatches((torch.ones(8), argument), {}, None, num_microbatches=4)
    assert not batch.inputs_look_alike
    batch = Microbatches((torch.ones(8),), {"named": argument}, None, num_microbatches=4)
    assert not batch.inputs_look_alike
