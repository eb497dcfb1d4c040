"""What the authors' own searches reach, to the unit: their planners run on their settings.

Source: sail-sg/zero-bubble-pipeline-parallelism, ``manual_order`` (ZB-1p, ZB-2p) and
``try_v_schedule`` (ZB-V), and the settings of the two versions of "Zero Bubble Pipeline
Parallelism". Times are microseconds, of a stage as placed; figures are spans. There, W holds less
than F does: of ``kept`` bytes I releases ``freed``. The limits are p or 2p times ``kept``.
"""

from __future__ import annotations

from typing import NamedTuple

from stageline.scheduling import Costs


class Setting(NamedTuple):
    """One setting: ranks, microbatches, times of F, I, W and a hop, bytes kept and freed by I."""

    p: int
    m: int
    f: int
    b: int
    w: int
    c: int
    kept: int
    freed: int

    @property
    def costs(self) -> Costs:
        """Its costs, with what a stage keeps."""
        return Costs(
            forward=self.f,
            input_gradient=self.b,
            weight_gradient=self.w,
            latency=self.c,
            activation_bytes=self.kept,
            input_gradient_frees=self.freed,
        )


STRAIGHT = {
    Setting(8, 24, 18522, 18086, 9337, 601, 201216, 127488): (1310405, 1152599),
    Setting(8, 32, 18513, 18086, 9331, 626, 201216, 127488): (1678164, 1475535),
    Setting(8, 64, 18546, 18097, 9321, 762, 201216, 127488): (3154286, 2949221),
    Setting(8, 24, 29718, 29444, 19927, 527, 303104, 172032): (2187537, 1903596),
    Setting(8, 32, 29802, 29428, 19530, 577, 303104, 172032): (2814376, 2525780),
    Setting(8, 64, 29935, 29621, 19388, 535, 303104, 172032): (5348572, 5057708),
    Setting(16, 48, 11347, 11248, 8132, 377, 378880, 215040): (1714461, 1484721),
    Setting(16, 64, 11307, 11254, 8101, 379, 378880, 215040): (2202008, 1972943),
    Setting(16, 128, 11325, 11308, 8109, 378, 378880, 215040): (4175516, 3946061),
    Setting(32, 96, 10419, 10207, 7715, 408, 454656, 258048): (3171569, 2731004),
    Setting(32, 128, 10408, 10204, 7703, 408, 454656, 258048): (4075091, 3634724),
    Setting(32, 256, 10402, 10248, 7698, 460, 454656, 258048): (7715640, 7270432),
}
"""The spans of ZB-1p and ZB-2p."""

VEE = {
    Setting(16, 48, 14407, 14380, 9676, 1610, 303104, 172032): 3969197,
    Setting(16, 64, 14412, 14393, 9688, 1621, 303104, 172032): 5204741,
    Setting(16, 128, 14316, 14306, 9639, 1619, 303104, 172032): 10071047,
    Setting(24, 72, 6763, 6969, 5251, 755, 378880, 215040): 2919856,
    Setting(24, 96, 6783, 6984, 5259, 758, 378880, 215040): 3838352,
    Setting(24, 192, 6785, 6990, 5260, 770, 378880, 215040): 7496545,
    Setting(32, 96, 9458, 9748, 7288, 879, 454656, 258048): 5407444,
    Setting(32, 128, 9469, 9744, 7306, 892, 454656, 258048): 7109550,
    Setting(32, 256, 9447, 9644, 7193, 887, 454656, 258048): 13782480,
}
"""The span of ZB-V, with 2p times ``kept``; times are of each of the two stages of a rank."""

UNEQUAL = (
    (3, 8, [5, 9, 6], [8, 8, 7], [2, 4, 8], 2, 6, 171),
    (6, 18, [9, 12, 11, 12, 8, 4], [4, 9, 11, 9, 10, 10], [4, 4, 5, 5, 2, 4], 1, 7, 538),
    (3, 18, [12, 9, 12], [12, 6, 11], [8, 7, 7], 1, 6, 581),
    (3, 12, [11, 12, 7], [11, 8, 11], [7, 9, 9], 1, 6, 348),
    (4, 18, [7, 9, 6, 8], [11, 8, 8, 12], [8, 6, 5, 9], 2, 6, 537),
    (6, 18, [5, 9, 4, 7, 5, 4], [4, 8, 7, 5, 12, 6], [6, 5, 5, 2, 8, 2], 0, 8, 458),
    (4, 8, [7, 4, 5, 5], [5, 4, 4, 4], [7, 6, 4, 4], 2, 5, 163),
    (6, 18, [4, 10, 4, 7, 6, 4], [4, 9, 5, 8, 9, 11], [2, 6, 9, 2, 6, 8], 2, 11, 462),
)
"""Unequal stages: ranks, microbatches, F, I, W, hop, activations, and the span of ZB's search."""
