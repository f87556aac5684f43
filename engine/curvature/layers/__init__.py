"""The families of layers that are treated, one file each."""
