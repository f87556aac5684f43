"""The cases of the few-shot benchmark: a training step, its peak beside the predicted one, and recipes of scripts."""
