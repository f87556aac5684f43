"""Running a model: batches, outputs, the loss, its random state and buffers preserved, determinism."""
