"""The front doors of older systems, translated to ``Pipeline``.

The room is still empty. What moves in here translates arguments and names, and contains no engine.
"""
