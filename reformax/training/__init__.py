"""Training and evaluation of any model on any task, on all devices of all processes.

No module imports a model, a task or gin: `loop.train` gets them as arguments.
"""
