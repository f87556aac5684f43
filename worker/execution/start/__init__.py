"""The parts that an attempt begins with: its workspace, and what its loaders may use."""
