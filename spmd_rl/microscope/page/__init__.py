"""The report of an examination: the verdict in words, the JSON, and a page with pictures."""
