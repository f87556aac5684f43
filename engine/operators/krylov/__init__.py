"""Parts of the searches and estimates by products alone: bases, options, bounds."""
