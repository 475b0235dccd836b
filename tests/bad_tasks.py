"""Tasks that a campaign must end."""

import time


def endless():
    """A task that is never made."""
    while True:
        time.sleep(0.1)


def large():
    """A task that fills the memory."""
    kept = []
    while True:
        kept.append(bytearray(b"x") * 2**27)
