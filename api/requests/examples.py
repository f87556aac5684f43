"""Example job documents, shown in OpenAPI and on the dashboard, and parsed by a test."""

from typing import Any

EXAMPLES: tuple[dict[str, Any], ...] = (
    {
        "title": "Capacity of a small CNN on digits (seconds)",
        "document": {
            "kind": "capacity",
            "model": {"source": "builtin", "name": "digits_cnn"},
            "data": {"source": "builtin", "name": "digits"},
            "task": {"type": "classification"},
            "collection": {"fisher": "mc", "batch_size": 64, "seed": 0},
            "stabilisation": {"damping": 1e-4, "damping_mode": "relative", "kappa_max": 1e6},
            "labels": {"purpose": "first look"},
        },
    },
    {
        "title": "Factors and capacity of a tiny GPT on English text",
        "document": {
            "kind": ["factors", "capacity"],
            "model": {"source": "builtin", "name": "tiny_gpt"},
            "data": {"source": "builtin", "name": "english", "limit": 512},
            "task": {"type": "causal_lm"},
            "collection": {"fisher": "mc", "sharing": "expand", "batch_size": 32},
            "keep": ["factors", "spectra"],
        },
    },
    {
        "title": "Capacity of a small MLP, exact Fisher, double precision",
        "document": {
            "kind": "capacity",
            "model": {"source": "builtin", "name": "digits_mlp"},
            "data": {"source": "builtin", "name": "digits"},
            "task": {"type": "classification"},
            "collection": {"fisher": "type2", "dtype": "float64"},
        },
    },
    {
        "title": "Few-shot training on drawn characters (a minute or two)",
        "document": {
            "kind": "fewshot_training",
            "data": {"source": "strokes", "image_size": 28, "channels": 1},
            "fewshot_training": {
                "method": "FSCT_cosine",
                "backbone": "Conv4",
                "width": 32,
                "num_epoch": 5,
                "n_episode": 50,
                "test_iter": 80,
                "learning_rate": 2e-3,
            },
        },
    },
)
