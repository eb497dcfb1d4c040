"""What the user says about cuts, read and checked."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from stageline.capturing import Chain, capture_sequential
from stageline.capturing.graph import Cuttable, Mark
from stageline.partitioning import cut_sizes
from stageline.partitioning.splits import find_faults, paths_wanted, resolve
from tests.partitioning.fake_graph import FakeGraph, iterative, transformer


def graph() -> Chain:
    """Four blocks with 20, 0, 6 and 3 parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 1))
    return capture_sequential(model)


def block(name: str, begin: int, end: int, line: int = 1) -> Mark:
    return Mark("block", name, begin, end, f"model.py:{line}")


def point(name: str, position: int, line: int = 1) -> Mark:
    return Mark("cut", name, position, position, f"model.py:{line}")


def cuts_of(graph: Cuttable, split: Any) -> list[int]:
    cuts, faults = resolve(graph, split)
    assert faults == []
    return cuts


def faults_of(graph: Cuttable, split: Any) -> list[str]:
    _, faults = resolve(graph, split)
    return faults


@pytest.mark.parametrize(
    ("split", "sizes"),
    [(1, [4]), (2, [2, 2]), (3, [1, 2, 1]), (4, [1, 1, 1, 1]), ([2, 1, 1], [2, 1, 1]), ((4,), [4])],
)
def test_stages_are_balanced_or_as_the_user_said(split: Any, sizes: list[int]) -> None:
    assert find_faults(split) == []
    assert cut_sizes(graph(), split) == (sizes, [])
    assert len(cuts_of(graph(), split)) == len(sizes) - 1


@pytest.mark.parametrize(
    ("split", "fault"),
    [
        (0, "split=0: wanted a number of stages, at least 1"),
        (-2, "split=-2: wanted a number of stages"),
        (True, "split=True: wanted a number of stages (4) or blocks per stage ([2, 1])"),
        (2.0, "split=2.0: wanted a number of stages (4) or blocks per stage ([2, 1])"),
        ("2", "split='2': wanted a number of stages (4) or blocks per stage ([2, 1])"),
        ("mark", "split='mark': wanted a number of stages"),
        (None, "split=None: wanted a number of stages"),
        ({}, "split={}: wanted modules and sides"),
        ({"a": 1}, "split={'a': 1}: wanted 'begin' or 'end'"),
        ({"a": "END"}, "split={'a': 'END'}: wanted 'begin' or 'end'"),
        ({1: "end"}, "split: 1 is no name of a module"),
        ([], "split=[]: wanted the number of blocks of each stage"),
        ([3, 0, 1], "split=[3, 0, 1]: stage 1 has 0 blocks, wanted a whole number of at least 1"),
        ([True, 3], "split=[True, 3]: stage 0 has True blocks"),
        ([2, 2.0], "split=[2, 2.0]: stage 1 has 2.0 blocks"),
        (["a", 2], "split=['a', 2]: numbers, names and lists are mixed"),
        ([["a"], "b"], "split=[['a'], 'b']: numbers, names and lists are mixed"),
        (["a", "b", "a"], "split: 'a' is named twice"),
        (["a", ""], "split: '' is no name of a module"),
        ([["a"], []], "split: stage 1 is empty: give it a block"),
        ([["a"], [3]], "split: stage 1 names 3, wanted the name of a block"),
        ([["a"], ["a"]], "split: block 'a' is assigned twice, to stage 0 and stage 1"),
    ],
)
def test_a_split_that_fits_no_model(split: object, fault: str) -> None:
    assert find_faults(split)[0].startswith(fault)
    assert faults_of(transformer(), split)[0].startswith(fault)


def test_every_wrong_stage_is_named_at_once() -> None:
    assert [fault.split(": ")[1] for fault in find_faults([0, 1, -1])] == [
        "stage 0 has 0 blocks, wanted a whole number of at least 1",
        "stage 2 has -1 blocks, wanted a whole number of at least 1",
    ]
    assert len(find_faults([["a", "a"], [], [1]])) == 3
    assert len(find_faults({"a": "x", "b": "y", 3: "end"})) == 3


def test_more_stages_than_blocks() -> None:
    assert cut_sizes(graph(), 5) == (
        [],
        ["split=5: the model has 4 blocks, so it can be cut into at most 4 stages"],
    )
    marked = FakeGraph("abc", marks=[point("cut", 1)], cuts=[1])
    assert faults_of(marked, 3) == [
        "split=3: the model has 2 blocks, which is what its marks allow, so it can be cut into at "
        "most 2 stages"
    ]


@pytest.mark.parametrize("split", [[1, 1], [3, 2]])
def test_a_sum_that_is_not_the_number_of_blocks_lists_them(split: list[int]) -> None:
    sizes, (fault,) = cut_sizes(graph(), split)
    assert sizes == []
    assert fault == (
        f"split={split} places {sum(split)} blocks, the model has 4: "
        "0 Linear, 1 ReLU, 2 Linear, 3 Linear"
    )


def test_a_long_list_of_blocks_is_shortened() -> None:
    (fault,) = faults_of(FakeGraph([f"layers.{index}" for index in range(50)]), [1, 2])
    assert "layers.9 Layer, .., layers.41 Layer" in fault


@pytest.mark.parametrize(
    ("split", "paths"),
    [
        (4, []),
        ([2, 1], []),
        ("marks", []),
        (["a", "b.c"], ["a", "b.c"]),
        ({"a": "end", "b": "begin"}, ["a", "b"]),
        ([["a", "b"], ["c"]], ["a", "b", "c"]),
        ([["a", 1], None], ["a"]),  # wrong, but that is said elsewhere
    ],
)
def test_a_capture_opens_what_a_split_names(split: Any, paths: list[str]) -> None:
    assert paths_wanted(split) == paths


def test_a_stage_begins_at_the_first_call_of_each_named_module() -> None:
    assert cuts_of(transformer(), ["layers.1", "norm"]) == [3, 6]
    assert cuts_of(iterative(), ["output_proj"]) == [3]
    later = FakeGraph(["a", "b", "a", "b"])
    assert cuts_of(later, ["b"]) == [1]


@pytest.mark.parametrize(
    ("split", "faults"),
    [
        (["layers.44"], ["split: there is no module 'layers.44': did you mean 'layers.3'?"]),
        (["haed"], ["split: there is no module 'haed': did you mean 'head'?"]),
        (
            ["qqq"],
            [
                "split: there is no module 'qqq': there are embed, layers.0, layers.1, layers.2, "
                "layers.3, norm, head, layers and more"
            ],
        ),
        (
            ["layers"],
            ["split: module 'layers' is never called itself: name one inside it, 'layers.0'"],
        ),
        (["unused"], ["split: module 'unused' is never called itself: name one that is"]),
        (
            ["embed", "norm"],
            [
                "split: 'embed' runs first, the stage before it would be empty: leave it out, "
                "stage 0 needs no name"
            ],
        ),
        (
            ["norm", "layers.1"],
            ["split: 'layers.1' runs before 'norm': name modules in the order they run in"],
        ),
    ],
)
def test_names_that_cannot_begin_a_stage(split: list[str], faults: list[str]) -> None:
    assert faults_of(transformer(), split) == faults


def test_two_modules_that_begin_together_leave_an_empty_stage() -> None:
    nested = FakeGraph(["a", "b.0", "b.1"], opened={"b": (1, 3)})
    assert faults_of(nested, ["b", "b.0"]) == [
        "split: 'b' and 'b.0' begin at the same place, the stage between would be empty: leave "
        "one out"
    ]
    assert cuts_of(nested, ["b"]) == [1]


def test_all_wrong_names_are_found_at_once() -> None:
    assert len(faults_of(transformer(), ["x", "y", "unused"])) == 3
    assert len(faults_of(transformer(), {"x": "end", "unused": "begin"})) == 2


def test_three_iterations_and_a_projection_are_four_stages() -> None:
    assert cuts_of(iterative(), {"iter_block": "end"}) == [1, 2, 3]
    assert cuts_of(iterative(), {"iter_block": "begin"}) == [1, 2]


def test_a_loop_that_ends_the_model_leaves_no_empty_stage() -> None:
    assert cuts_of(FakeGraph(["loop"] * 3), {"loop": "end"}) == [1, 2]
    assert cuts_of(transformer(), {"layers.0": "end", "layers.1": "begin", "head": "end"}) == [2, 3]


@pytest.mark.parametrize(
    ("split", "fault"),
    [
        ({"head": "end"}, "split: nothing is computed after 'head', a stage there would be empty"),
        ({"embed": "begin"}, "split: nothing is computed before 'embed', a stage there would be "),
    ],
)
def test_a_side_with_nothing_behind_it_is_no_cut_at_all(split: Any, fault: str) -> None:
    assert faults_of(transformer(), split)[0].startswith(fault)


BLOCKS = [block("B1", 0, 2), block("B2", 3, 4), block("B3", 4, 6), block("B4", 6, 8)]


def with_blocks(*marks: Mark) -> FakeGraph:
    found = transformer()
    found.marks = list(marks)
    return found


def test_named_blocks_form_stages_and_what_lies_between_goes_with_the_one_before() -> None:
    assert cuts_of(with_blocks(*BLOCKS), [["B1", "B2"], ["B3", "B4"]]) == [4]
    assert cuts_of(with_blocks(*BLOCKS), [["B1"], ["B2"], ["B4", "B3"]]) == [3, 4]
    late = [block("B1", 1, 2), block("B2", 5, 6)]
    assert cuts_of(with_blocks(*late), [["B1"], ["B2"]]) == [5]


def test_a_block_may_be_entered_again_in_its_own_stage() -> None:
    again = with_blocks(block("B1", 0, 2), block("B2", 2, 4), block("B1", 4, 5), block("B3", 5, 8))
    assert cuts_of(again, [["B1", "B2"], ["B3"]]) == [5]


def test_a_block_entered_again_after_a_later_stage_began_is_refused() -> None:
    again = with_blocks(block("B1", 0, 2), block("B2", 2, 4), block("B1", 4, 8, line=9))
    want = (
        "split: block 'B1' of stage 0 is entered again (model.py:9) after block 'B2' of stage 1 "
        "began: stages go forward only, put both into one"
    )
    assert faults_of(again, [["B1"], ["B2"]]) == [want]
    assert faults_of(again, "marks") == [want]


def test_blocks_in_the_wrong_order_are_refused() -> None:
    assert faults_of(with_blocks(*BLOCKS), [["B2"], ["B1", "B3", "B4"]]) == [
        "split: block 'B2' of stage 0 runs (model.py:1) after block 'B1' of stage 1 began: stages "
        "go forward only, put both into one"
    ]


def test_blocks_that_are_unknown_or_left_over_are_named_at_once() -> None:
    assert faults_of(with_blocks(*BLOCKS), [["B1", "B22"], ["B3"]]) == [
        "split: there is no block 'B22': did you mean 'B2'?",
        "split: block 'B2' belongs to no stage",
        "split: block 'B4' belongs to no stage",
    ]


def test_a_block_that_computes_nothing_makes_no_stage() -> None:
    empty = with_blocks(block("B1", 0, 4), block("B2", 4, 4), block("B3", 4, 8))
    assert faults_of(empty, [["B1"], ["B2"], ["B3"]]) == [
        "split: stage 1 would be empty, its blocks compute nothing: join it with another"
    ]
    assert faults_of(empty, "marks") == [
        "split='marks': block 'B2' (model.py:1) computes nothing, its stage would be empty"
    ]


def test_without_block_marks_groups_name_modules() -> None:
    groups = [["embed", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "head"]]
    assert cuts_of(transformer(), groups) == [4]
    assert cuts_of(graph(), [["0"], ["2", "3"]]) == [2]  # ReLU has no parameters, and no name here


def test_groups_of_modules_that_do_not_fit() -> None:
    assert faults_of(transformer(), [["embed", "layers.0"], ["layers.1", "layers.2", "norm"]]) == [
        "split: 'layers.3' belongs to no stage",
        "split: 'head' belongs to no stage",
    ]
    nested = FakeGraph(["a", "b.0", "b.1"], opened={"b": (1, 3)})
    assert faults_of(nested, [["a", "b.0"], ["b"]]) == [
        "split: 'b.0' lies inside 'b': it cannot be assigned again"
    ]
    assert faults_of(iterative(), [["iter_block"], ["iter"]])[0].startswith(
        "split: there is no module 'iter': did you mean 'iter_block'?"
    )
    assert faults_of(FakeGraph(["a", "b", "a"]), [["a"], ["b"]]) == [
        "split: block 'a' of stage 0 is entered again after block 'b' of stage 1 began: stages go "
        "forward only, put both into one"
    ]


def test_every_cut_point_is_a_cut() -> None:
    assert cuts_of(with_blocks(point("c.0", 3), point("c.1", 6)), "marks") == [3, 6]


def test_cut_points_that_leave_a_stage_empty_are_all_named() -> None:
    points = [point("a", 0), point("b", 3), point("c", 3, line=7), point("d", 8)]
    assert faults_of(with_blocks(*points), "marks") == [
        "split='marks': CutPoint a (model.py:1) lies before the first operation, a stage would be "
        "empty: remove it",
        "split='marks': CutPoint c (model.py:7) lies where b does, the stage between would be "
        "empty",
        "split='marks': CutPoint d (model.py:1) lies after the last operation, a stage would be "
        "empty: remove it",
    ]


def test_blocks_and_what_calls_modules_between_them_are_stages() -> None:
    """Position 2 to 3 is one operation without a module: it goes with the block before."""
    assert cuts_of(with_blocks(*BLOCKS), "marks") == [3, 4, 6]
    assert cuts_of(with_blocks(block("B1", 1, 2), block("B2", 4, 6)), "marks") == [1, 2, 4, 6]
    again = with_blocks(block("B1", 0, 2), block("B1", 3, 5), block("B2", 5, 8))
    assert cuts_of(again, "marks") == [5]


def test_marks_of_both_kinds_are_joined() -> None:
    both = with_blocks(block("B1", 0, 4), point("cut", 4), block("B2", 4, 8), point("inner", 6))
    assert cuts_of(both, "marks") == [4, 6]


def test_a_model_without_marks_cannot_be_cut_at_them() -> None:
    (fault,) = faults_of(transformer(), "marks")
    assert fault.startswith(
        "split='marks': wanted a model with marks, it has none: put sl.CutPoint"
    )


def test_a_number_of_stages_chooses_among_the_marks() -> None:
    marked = FakeGraph("abcdef", marks=[point("x", 1), point("y", 4)], cuts=[1, 4])
    assert cuts_of(marked, 2) == [4]
    assert cuts_of(marked, [1, 2]) == [1]
