"""The factor cache as a child sees it: the key of a collection, and the entry under it."""
