"""The layout of the rows of a layer's calls: their order, masked positions, lengths, shared inputs."""
