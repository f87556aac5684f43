"""The parts of a few-shot training: its model, its plan, its tests and its steps."""
