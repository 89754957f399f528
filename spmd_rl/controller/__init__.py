"""Controller: the process of the recipe, its workers, and the channel between them."""
