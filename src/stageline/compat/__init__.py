"""The front doors of older systems, translated to ``Pipeline``.

Each is a package with the module paths of the original: a script changes the first word of its
imports. A door translates arguments and names, and contains no engine.
"""
