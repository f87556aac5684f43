"""Training any model with any loss: gradients in slices of the inputs, 16 bits, and steps of an optimiser."""
