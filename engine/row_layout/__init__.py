"""How the rows of a layer's calls belong to examples: their order, masked positions, lengths, shared inputs."""
