"""What searches and estimates by products alone are made of: bases, options, bounds."""
