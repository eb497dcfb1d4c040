"""The backward of a stage in two halves: I makes the gradient of its input, W those of its weights.

    F   parameter ──▶ ┌────────┐
                      │ linear │ ──▶ output     in a graph of its own, behind a bridge
        activation ─▶ └────────┘
    I   activation ◀── bridge ◀── gradient      through that graph, to the activation alone
                         │ keeps (edge, gradient)
    W   parameter ◀──────┘                      one backward from all that was kept

worth.py        which stages are split at all
parameters.py   what is made of parameters alone: proved, never guessed
deferred.py     what I leaves for W, and the two places in a graph where it is left
mode.py         the function mode that builds them in while F runs
layers.py       the same for a stage of known layers, whose calls nobody has to follow
again.py        F that keeps no graph, and what R needs to run it again

What cannot be deferred is done in I: it is right, only not deferred.
"""
