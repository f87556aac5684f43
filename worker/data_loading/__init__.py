"""Data of every source, one file each; all give a ``DataStream``."""
