"""Two factors of one layer, one from each of two sets: common coordinates, and what is computed of the two."""
