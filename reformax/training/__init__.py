"""Training and evaluation of any model on any task, on all devices of one host.

Nothing here names a model, a task or gin: `loop.train` receives them as arguments.
"""
