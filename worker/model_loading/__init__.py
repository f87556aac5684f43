"""Models of every source, one file each; all give a ``LoadedModel``."""
