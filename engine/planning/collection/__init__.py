"""The plan of a collection: its bytes, its seconds, and what ranks hold while they add up their sums."""
