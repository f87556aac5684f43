"""Real faults on a real stack: what a killed, paused or cut-off part may cost, and what never."""
