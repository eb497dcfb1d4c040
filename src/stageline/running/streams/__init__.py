"""Random numbers that do not depend on how a model is cut: every draw has a generator of its own.

candidates.py   which stages may draw at all
redirect.py     draws go to the generator of their key
stand_in.py     the default generator, as code inside a step sees it: checkpoints rely on it
calls.py        what a call of a pipeline gives its stages
"""
