"""The rows of the families, in the shape of their pictures.

Those of torch's families were written by torch 2.13's own schedule classes, those of V-Half and
V-Min by the authors' ``zbv_greedy.py``, those of BitPipe and Varuna agree with the orders in the
authors' code.
"""

from __future__ import annotations

from stageline.scheduling import parse
from stageline.scheduling.schedules import (
    bitpipe,
    chimera,
    dualpipe,
    dualpipe_v,
    interleaved,
    interleaved_zb,
    looped_bfs,
    v_half,
    v_min,
    varuna,
    zb_h1,
    zb_h2,
    zb_v,
)


def test_interleaved() -> None:
    assert interleaved(4, 4) == parse("""
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3""")


def test_interleaved_with_a_remainder() -> None:
    """Five microbatches on two ranks: a group of three, and one of the two that remain."""
    assert interleaved(4, 5) == interleaved(4, 5, group_size=3)
    assert interleaved(4, 5) == parse("""
        0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4
        1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4""")


def test_looped_bfs() -> None:
    assert looped_bfs(4, 3) == parse("""
        0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 0B2 0B1 0B0
        1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0""")


def test_zb_h1() -> None:
    assert zb_h1(3, 4) == parse("""
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3""")


def test_zb_h1_with_two_stages_on_a_rank() -> None:
    assert zb_h1(3, 2, num_ranks=2) == parse("""
        0F0 1F0 0F1 1F1 1I0 0I0 1W0 0W0 1I1 0I1 1W1 0W1
        2F0 2I0 2F1 2I1 2W0 2W1""")


def test_zb_h2() -> None:
    assert zb_h2(3, 6) == parse("""
        0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
        1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5
        2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5""")


def test_interleaved_zb_is_the_golden_order_of_torch() -> None:
    """``zb1p_2rank_2stagep_compute.csv`` of torch's tests."""
    assert interleaved_zb(4, 8) == parse(
        "0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 "
        "2I2 2W2 0F4 2I3 2W3 0F5 0I2 0W2 2F4 0I3 0W3 2F5 "
        "2I4 2W4 0F6 2I5 2W5 0F7 0I4 0W4 2F6 0I5 0W5 2F7 "
        "2I6 2W6 2I7 2W7 0I6 0W6 0I7 0W7\n"
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 "
        "3I3 3W2 1F4 1I2 3W3 1F5 1I3 1W2 3F4 3I4 1W3 3F5 "
        "3I5 3W4 1F6 1I4 3W5 1F7 1I5 1W4 3F6 3I6 1W5 3F7 "
        "3I7 3W6 1I6 3W7 1I7 1W6 1W7"
    )


def test_zb_v() -> None:
    assert zb_v(4, 4) == parse(
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 "
        "0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3\n"
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 "
        "2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3"
    )


def test_v_half() -> None:
    assert v_half(6, 4) == parse("""
    0F0 0F1 0F2 5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 0F3 5F2 5I2 5W2 0I1 0W1 5F3 5I3 0I2 5W3 0W2 0I3 0W3
    1F0 1F1 4F0 4F1 4I0 4W0 1F2 1I0 4I1 4W1 4F2 1W0 1F3 1I1 4I2 4W2 4F3 1W1 1I2 4I3 4W3 1W2 1I3 1W3
    2F0 3F0 2F1 3F1 3I0 3W0 2I0 2W0 2F2 3F2 3I1 2I1 3W1 2F3 2W1 3F3 3I2 2I2 3W2 2W2 3I3 2I3 3W3 2W3
    """)


def test_v_min() -> None:
    assert v_min(6, 4) == parse("""
    0F0 0F1 0F2 5F0 5I0 5W0 5F1 0I0 5I1 5W1 0W0 5F2 0F3 0I1 5I2 5W2 0W1 5F3 5I3 0I2 5W3 0W2 0I3 0W3
    1F0 1F1 4F0 4F1 4I0 4W0 1I0 1F2 1W0 4I1 4F2 4W1 1I1 1F3 1W1 4I2 4F3 4W2 1I2 4I3 4W3 1W2 1I3 1W3
    2F0 3F0 2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 2F3 3F3 3I2 2I2 3W2 2W2 3I3 2I3 3W3 2W3
    """)


def test_dualpipe_v_is_the_golden_order_of_torch() -> None:
    """``dualpipev_4rank_10mb.csv`` of torch's tests."""
    assert dualpipe_v(8, 10) == parse(
        "0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 "
        "0F7&7B3 7F4&0B0 0F8&7B4 7F5&0B1 0F9&7B5 7F6&0B2 7B6 7F7&0B3 7B7 7F8&0B4 7B8 7F9&0B5 "
        "7B9 0I6 0W6 0I7 0W7 0I8 0W8 0I9 0W9\n"
        "1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 "
        "1F6&6B2 6F4&1B0 1F7&6B3 6F5&1B1 1F8&6B4 6F6&1B2 1F9&6B5 6F7&1B3 6B6 6F8&1B4 6B7 6F9&1B5 "
        "6B8 1B6 6I9 1I7 6W9 1I8 1W7 1I9 1W8 1W9\n"
        "2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 "
        "2F5&5B1 5F4&2B0 2F6&5B2 5F5&2B1 2F7&5B3 5F6&2B2 2F8&5B4 5F7&2B3 2F9&5B5 5F8&2B4 "
        "5B6 5F9&2B5 5B7 2B6 5B8 2I7 5I9 2I8 2W7 2I9 5W9 2W8 2W9\n"
        "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 3F4 4B0 "
        "4F4&3B0 3F5&4B1 4F5&3B1 3F6&4B2 4F6&3B2 3F7&4B3 4F7&3B3 3F8&4B4 4F8&3B4 3F9&4B5 4F9&3B5 "
        "4B6 3B6 4B7 3B7 4I8 3I8 4I9 3I9 4W8 3W8 4W9 3W9"
    )


def test_varuna() -> None:
    assert varuna(3, 5) == parse("""
        0F0 0F1 0F2 0F3 0F4 0R0 0B0 0R1 0B1 0R2 0B2 0R3 0B3 0R4 0B4
        1F0 1F1 1F2 1R0 1B0 1R1 1B1 1R2 1B2 1F3 1F4 1R3 1B3 1R4 1B4
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4""")
    assert varuna(4, 4) == parse("""
        0F0 0F1 0F2 0F3 0R0 0B0 0R1 0B1 0R2 0B2 0R3 0B3
        1F0 1F1 1F2 1F3 1R0 1B0 1R1 1B1 1R2 1B2 1R3 1B3
        2F0 2F1 2F2 2R0 2B0 2R1 2B1 2R2 2B2 2F3 2R3 2B3
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3""")
    assert varuna(3, 1, num_ranks=2) == parse("0F0 1F0 0R0 1R0 1B0 0B0 \n 2F0 2B0")


def test_dualpipe() -> None:
    assert dualpipe(4, 8) == parse("""
        replicas: 2
        0F0 0F1 0F2 3F4 3I4 3W4 3F5 0F3&3B5 3F6&0B0 3B6 3F7&0B1 3B7 0I2 0W2 0I3 0W3
        1F0 2F4 1F1 2F5 1F2 2B4 2F6&1B0 1F3&2B5 2F7&1B1 2B6 1B2 2I7 1I3 2W7 1W3
        1F4 2F0 1F5 2F1 1F6 2B0 2F2&1B4 1F7&2B1 2F3&1B5 2B2 1B6 2I3 1I7 2W3 1W7
        0F4 0F5 0F6 3F0 3I0 3W0 3F1 0F7&3B1 3F2&0B4 3B2 3F3&0B5 3B3 0I6 0W6 0I7 0W7""")


def test_chimera() -> None:
    assert chimera(4, 4) == parse("""
        replicas: 2
        0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1
        1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1
        1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3
        0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3""")


def test_bitpipe() -> None:
    assert bitpipe(8, 4) == parse("""
        replicas: 2
        0F0 0F1 3F2 4F2 3F3 4F3 7F0 7B0 7F1 7B1 4B2 3B2 4B3 3B3 0B0 0B1
        1F0 2F2 1F1 2F3 5F2 6F0 5F3 6F1 6B0 5B2 6B1 5B3 2B2 1B0 2B3 1B1
        1F2 2F0 1F3 2F1 5F0 6F2 5F1 6F3 6B2 5B0 6B3 5B1 2B0 1B2 2B1 1B3
        0F2 0F3 3F0 4F0 3F1 4F1 7F2 7B2 7F3 7B3 4B0 3B0 4B1 3B1 0B2 0B3""")
