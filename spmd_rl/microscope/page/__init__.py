"""The page and the JSON file of a comparison."""
