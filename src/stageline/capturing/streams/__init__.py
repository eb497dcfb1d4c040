"""Where in the model random numbers are drawn: what a stage and the plain model agree on.

keys.py        names and positions as whole numbers
frames.py      the call that a thread is in, and how often it has drawn
tracking.py    calls of modules followed, for a time
functions.py   which functions of torch draw
"""
