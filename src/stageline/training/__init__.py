"""Around a step: clipping, scaling, recompute, offload, data parallel, checkpoints.

The room is still empty. What moves in here wraps ``Pipeline.step`` or works on a pipeline's
parameters; the engine does not know it.
"""
