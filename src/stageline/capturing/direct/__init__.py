"""Calls of modules without what stands around them: the same operations on the same tensors.

    self.norm(self.conv(x))      __getattr__, __call__, _wrapped_call_impl, _call_impl, forward,
                                 __getattr__, ..., conv2d: 7 functions in Python around one
                                 (of a ReLU 5, of a BatchNorm 14)
    norm(conv(x))                1 for each

Of a narrow ResNet that is a twentieth of the time, since between two kernels all of Python is cold.

    layers.py      torch's most common layers, each as a function
    rewriting.py   code of the user's own, in which calls of layers are direct
    calls.py       a module, called directly for as long as nothing about it changes
"""
