"""One adapter per library: ``collect(problem, stream) -> {layer: (A, G)}``, or whatever the library raises."""
