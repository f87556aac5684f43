"""The gradient identity: proof on the caller's own data that rows are the gradient of each example alone."""
