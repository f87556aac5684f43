"""Free space, and the folder of cached factors."""
