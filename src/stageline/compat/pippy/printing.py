"""How a pipe and its stages print: the modules of each stage, and what is done with them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stageline.capturing.stage import StageModule
from stageline.partitioning.plan import Plan


def stage_texts(plan: Plan, opened: Plan | None) -> list[str]:
    """Return the text of every stage.

    Args:
        plan: The stages as they run.
        opened: The same stages with all modules open, if they could be opened.
    """
    return [_stage_text(stage) for stage in (opened or plan).parts.stages]


def _stage_text(stage: StageModule) -> str:
    """Return the modules that a stage calls, by their names in the model, and its code."""
    called = dict.fromkeys(
        str(node.target) for node in stage.graph.nodes if node.op == "call_module"
    )
    modules = "".join(
        f"  ({name}): {_indented(repr(stage.get_submodule(name)))}\n" for name in called
    )
    listed = f"PipeStageModule(\n{modules})" if modules else "PipeStageModule()"
    return f"{listed}\n\n{str(stage).partition(chr(10) * 2)[2]}"


def pipe_text(plan: Plan, stages: Sequence[str]) -> str:
    """Return the text of a pipe: its stages, and how they call each other."""
    listed = "".join(
        f"  (submod_{index}): {_indented(text.partition(chr(10) * 2)[0])}\n"
        for index, text in enumerate(stages)
    )
    return f"GraphModule(\n{listed})\n\n{pipe_code(plan)}"


def pipe_code(plan: Plan) -> str:
    """Return how the stages call each other, as the code of a ``forward``."""
    variant = plan.parts.variants[0]
    arguments = {node: f"arg{index}" for index, node in variant.recording.inputs.items()}
    makers = {value: index for index, code in enumerate(variant.codes) for value in code.makes}
    calls = []
    for index, code in enumerate(variant.codes):
        used = [
            f"submod_{makers[value]}" if value in makers else arguments[value]
            for value in code.uses
        ]
        used += [f"arg{place}" for place in code.inputs]
        calls.append((index, list(dict.fromkeys(used))))
    last = {name: index for index, used in calls for name in used}
    lines = []
    for index, used in calls:
        ended = " = ".join(name for name in used if last[name] == index)
        freed = f";  {ended} = None" if ended else ""
        lines.append(f"    submod_{index} = self.submod_{index}({', '.join(used)}){freed}")
    names = ", ".join(f"arg{index}" for index in sorted(variant.recording.inputs))
    lines.append(f"    return [submod_{len(calls) - 1}]")
    return "\n".join([f"def forward(self, {names}):", *lines])


def _indented(text: str) -> str:
    return re.sub(r"\n", "\n  ", text)
