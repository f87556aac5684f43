"""Text as data: rows of text, tagged words, and the tokenizer that runs in a process of its own."""
