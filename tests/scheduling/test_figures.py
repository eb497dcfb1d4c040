"""Time, span and peak of every family against closed forms and published figures, to the unit.

p ranks, m microbatches, v stages per rank; f, b, w are forward, input gradient and weight gradient
of a stage, so that a full backward takes b + w; c is the latency.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from stageline.errors import ScheduleError
from stageline.scheduling import Costs, Simulation, schedules, simulate
from stageline.scheduling.schedules import (
    bitpipe,
    chimera,
    dualpipe,
    dualpipe_v,
    interleaved,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    varuna,
    zb_h1,
    zb_h2,
    zb_v,
)

SPLITS = [(f, b, w) for f in (1, 2, 3, 5) for b in (1, 2, 4) for w in (1, 2, 3)]
LOOPS = [(p, v) for p in (2, 4, 8) for v in (2, 3, 4)]


def costs(f: int, b: int, w: int, c: int = 0) -> Costs:
    return Costs(f, b + w, b, w, latency=c)


def figures(simulation: Simulation) -> tuple[object, object, object]:
    return simulation.T, simulation.span, max(simulation.peak_activations)


# F takes 1 and B 2 on a rank's share of the model, so m microbatches take at least 3 m.
#            p = 4, m = 8            p = 8, m = 16
#            T      span    peak     T      span    peak
TABLE = """
gpipe        33     33      8        69     69      16
1f1b         33     33      4        69     69      8
interleaved  28.5   28.5    5.5      58.5   58.5    11.5
interleaved4 26.25  26.25   4.75     53.25  53.25   9.75
looped-bfs   28.5   28.5    8        58.5   58.5    16
zb-h1        27     27      4        55     55      8
zb-h2        27     24      7        55     48      15
interleaved-zb 25.5 25.5    4        51.5   51.5    8
zb-v         25.5   24      4        51.5   48      8
v-half       26.5   26.5    3        56.5   56.5    5
v-min        29.5   29.5    2        61.5   61.5    4
dualpipe     26     26      5        54     54      9
dualpipe-v   27     27      4.5      55     55      8.5
chimera      30     30      4        66     66      8
bitpipe      27     27      4        57     57      8
"""


@pytest.mark.parametrize("line", TABLE.strip().splitlines(), ids=lambda line: line.split()[0])
def test_the_table(line: str) -> None:
    word, *numbers = line.split()
    name = word.rstrip("4")
    v = 4 if word.endswith("4") else schedules.family(name).stages_per_rank
    wanted = [Fraction(number) for number in numbers]
    for (p, m), row in (((4, 8), wanted[:3]), ((8, 16), wanted[3:])):
        schedule = schedules.build(name, v * p, m, num_ranks=p)
        simulation = simulate(schedule, Costs(Fraction(1, v), Fraction(2, v)))
        assert figures(simulation) == tuple(row)


@pytest.mark.parametrize(("f", "b"), [(1, 1), (1, 2), (2, 1), (3, 4)])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_1f1b_that_is_ahead_pays_for_latency_only_once(ahead: int, f: int, b: int) -> None:
    most = Fraction(ahead * (f + b), 2)
    latencies = (Fraction(0), Fraction(1, 3), most)
    for p, m, c in product((2, 3, 4, 6), (1, 2, 5, 13), latencies):
        simulation = simulate(one_f_one_b(p, m, ahead=ahead), Costs(f, b, latency=c))
        assert (m + p - 1) * (f + b) + 2 * c * (p - 1) == simulation.T
        held = [min(p - rank + ahead * (p - 1 - rank), m) for rank in range(p)]
        assert simulation.peak_activations == tuple(held)
    late = simulate(one_f_one_b(4, 40, ahead=ahead), Costs(f, b, latency=most + 1))
    assert 43 * (f + b) + 6 * (most + 1) < late.T


def test_1f1b_cannot_be_behind() -> None:
    with pytest.raises(ScheduleError, match="ahead is -1: give 0"):
        one_f_one_b(2, 4, ahead=-1)


@pytest.mark.parametrize(("p", "v"), LOOPS)
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_interleaved(p: int, v: int, rounds: int) -> None:
    m = rounds * p
    schedule = interleaved(v * p, m, num_ranks=p)
    for f, b in ((1, 2), (2, 3), (3, 3)):
        assert (m * v + p - 1) * (f + b) == simulate(schedule, Costs(f, b)).T
    held = [min((v - 1) * p + 2 * (p - 1 - rank) + 1, m * v) for rank in range(p)]
    assert simulate(schedule).peak_activations == tuple(Fraction(chunks, v) for chunks in held)
    small = Costs(100, 200, latency=1)
    assert (m * v + p - 1) * 300 + 2 * (v * p - 1) == simulate(schedule, small).T


@pytest.mark.parametrize(("p", "v"), LOOPS)
def test_looped_bfs(p: int, v: int) -> None:
    for m in (p, p + 1, 2 * p, 3 * p):
        simulation = simulate(looped_bfs(v * p, m, num_ranks=p), Costs(1, 2))
        assert (m * v + p - 1) * 3 == simulation.T
        assert simulation.peak_activations == (m,) * p


@pytest.mark.parametrize(("f", "b", "w"), SPLITS)
def test_zb_h1(f: int, b: int, w: int) -> None:
    for p in (2, 3, 4, 8):
        for m in (p, 2 * p, 3 * p):
            simulation = simulate(zb_h1(p, m), costs(f, b, w))
            assert simulation.T - m * (f + b + w) == (p - 1) * (f + b - min(f, b, w))
            assert simulation.peak_activations == (p,) * p


@pytest.mark.parametrize(("f", "b", "w"), SPLITS)
def test_zb_h2(f: int, b: int, w: int) -> None:
    for p in (2, 3, 4, 8):
        for m in (2 * p, 2 * p + 1, 3 * p):
            simulation = simulate(zb_h2(p, m), costs(f, b, w))
            bubble = (p - 1) * max(0, f + b - 2 * w, b - f)
            assert simulation.span - m * (f + b + w) == bubble
            assert simulation.peak_activations == (2 * p - 1,) * p
            if bubble == 0:
                assert simulation.span + (p - 1) * f == simulation.T


@pytest.mark.parametrize(("p", "v"), LOOPS)
def test_interleaved_zb(p: int, v: int) -> None:
    for m, (f, b, w) in product((p, 2 * p, 3 * p), ((1, 1, 1), (2, 2, 1), (3, 3, 2))):
        simulation = simulate(interleaved_zb(v * p, m, num_ranks=p), costs(f, b, w))
        assert simulation.T - m * v * (f + b + w) == (p - 1) * (f + b - w)
        assert simulation.peak_activations == (p,) * p


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zb_v(p: int) -> None:
    for m in (2 * p - 1, 2 * p, 3 * p + 1):
        simulation = simulate(zb_v(2 * p, m), costs(1, 1, 1))
        assert simulation.span == 6 * m
        assert 6 * m + p - 1 == simulation.T
        assert simulation.peak_activations == (p,) * p


def test_zb_v_of_a_short_batch_has_bubbles() -> None:
    assert [simulate(zb_v(2 * p, p), costs(1, 1, 1)).span for p in (4, 8)] == [30, 62]


@pytest.mark.parametrize("p", range(2, 17))
def test_v_half(p: int) -> None:
    bubble = 1 if p == 2 else 3 * p - 7 if p % 2 == 0 else 3 * p - 4
    for m in (2 * p, 3 * p):
        simulation = simulate(v_half(2 * p, m), costs(1, 1, 1))
        assert (simulation.span - 6 * m, max(simulation.peak_activations)) == (bubble, (p + 2) // 2)


@pytest.mark.parametrize("p", range(2, 17))
def test_v_min(p: int) -> None:
    bubble = 4 * p - 7 if p % 3 == 0 else 4 * p - 5
    for m in (2 * p, 3 * p):
        simulation = simulate(v_min(2 * p, m), costs(1, 1, 1))
        assert (simulation.span - 6 * m, max(simulation.peak_activations)) == (bubble, (p + 4) // 3)


@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (2, 2, 1), (3, 3, 2)])
def test_dualpipe_readme(f: int, b: int, w: int) -> None:
    """Bubble (PP/2 - 1)(F&B + B - 3W), activations PP + 1: the table of DeepSeek's README."""
    pair, full = f + b + w, b + w
    for stages in (4, 8):
        bubble = (stages // 2 - 1) * (pair + full - 3 * w)
        for m in (2 * stages, 2 * stages + 6):
            simulation = simulate(dualpipe(stages, m), costs(f, b, w))
            assert simulation.T - m * (f + b + w) == bubble
            assert simulation.peak_activations == (stages + 1,) * stages
    for p in (2, 4, 8):
        bubble = (p - 1) * (pair + full - 3 * w)
        for m in (2 * p, 2 * p + 3):
            simulation = simulate(dualpipe_v(2 * p, m), costs(f, b, w))
            assert simulation.T - 2 * m * (f + b + w) == bubble
            assert simulation.peak_activations == (Fraction(2 * p + 1, 2),) * p


@pytest.mark.parametrize(("pair", "T"), [(3, 66), (Fraction(5, 2), 59), (2, 52), (None, 66)])
def test_dualpipe_gains_by_overlapping(pair: Fraction | None, T: int) -> None:
    assert simulate(dualpipe(8, 20), Costs(1, 2, pair=pair)).T == T


def test_dualpipe_v_of_ten_microbatches() -> None:
    assert simulate(dualpipe_v(8, 10), Costs(1, 2)).T == 66


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_chimera(p: int) -> None:
    for units in (1, 2, 3):
        m = units * p
        equal, double = (simulate(chimera(p, m), Costs(1, b)) for b in (1, 2))
        assert equal.T - 2 * m == p - 2
        assert equal.bubble == Fraction(p - 2, 2 * m + p - 2)
        assert double.T - 3 * m == (p - 2) * (units + 1)
        held = [p // 2 + 1 + min(rank, p - 1 - rank) for rank in range(p)]
        assert equal.peak_activations == tuple(held)


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
def test_bitpipe(p: int) -> None:
    for units in (1, 2, 3):
        m = units * p
        equal, double = (simulate(bitpipe(2 * p, m), Costs(1, b)) for b in (1, 2))
        assert equal.T - 4 * m == p - 2
        assert equal.bubble == Fraction(p - 2, 4 * m + p - 2)
        assert double.T - 6 * m == (p - 2) * (units + 1)
        held = [3 * p // 2 + 1 + min(rank, p - 1 - rank) for rank in range(p)]
        assert equal.peak_activations == tuple(Fraction(chunks, 2) for chunks in held)


@pytest.mark.parametrize("p", range(2, 9))
def test_varuna(p: int) -> None:
    for m in range(1, 40):
        simulation = simulate(varuna(p, m), Costs(1, 2))
        assert 4 * m + 3 * (p - 2) + 2 - (m - 1) % 3 == simulation.T
        # A forward that will be run again keeps its input alone; R makes one activation at a time.
        assert simulation.peak_activations == (1,) * p


def test_varuna_in_the_quanta_of_its_authors() -> None:
    quanta = {(2, 8): 33, (4, 8): 39, (4, 16): 72, (4, 32): 135, (8, 32): 147}
    assert {size: simulate(varuna(*size), Costs(1, 2)).T for size in quanta} == quanta


# Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024): measured costs in microseconds.
ZERO_BUBBLE = """
# p m   f     b     w     c     1F1B     H1       H2
  8 24  18522 18086 9337  601   1456749  1310405  1236632
  8 64  29935 29621 19388 535   5671364  5348572  5205366
 16 64  11307 11254 8101  379   2478390  2202008  2069123
 32 96  10419 10207 7715  408   3699675  3171569  2907108
"""

# The arXiv version: f, b, w of one of two stages per rank; the others have one twice as long.
WITH_ZB_V = """
# p m   f     b     w    c     1F1B      H1        H2        ZB-V
 16 48  14407 14380 9676 1610  5036318   4362378   4023798   3975626
 24 96   6783  6984 5259  758  4701012   4114096   3837314   3835430
 32 256  9447  9644 7193  887  15580188  14305072  13804112  13772578
"""


def numbers(table: str) -> list[list[int]]:
    return [[int(word) for word in line.split()] for line in table.strip().splitlines()[1:]]


@pytest.mark.parametrize("row", numbers(ZERO_BUBBLE), ids=str)
def test_the_zero_bubble_paper(row: list[int]) -> None:
    p, m, f, b, w, c, *wanted = row
    measured = costs(f, b, w, c)
    assert [
        simulate(one_f_one_b(p, m), measured).T,
        simulate(zb_h1(p, m), measured).T,
        simulate(zb_h2(p, m), measured).span,
    ] == wanted


@pytest.mark.parametrize("row", numbers(WITH_ZB_V), ids=str)
def test_the_zero_bubble_paper_with_two_stages_per_rank(row: list[int]) -> None:
    p, m, f, b, w, c, *wanted = row
    measured = costs(2 * f, 2 * b, 2 * w, c)
    assert [
        simulate(one_f_one_b(p, m), measured).T,
        simulate(zb_h1(p, m), measured).T,
        simulate(zb_h2(p, m), measured).span,
        simulate(zb_v(2 * p, m), costs(f, b, w, c)).span,
    ] == wanted
