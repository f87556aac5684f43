"""A and G after collection: how they are stored, decomposed forms of low rank, clipping and inverses."""
