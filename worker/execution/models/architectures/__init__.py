"""Architectures that a checkpoint may have, and the reading of the ``config.json`` that describes one."""
