"""One generator per analysis of the catalog, ``(params, workspace) -> Generator[LayerResult, None, Summary]``."""
