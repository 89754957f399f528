"""Controller: the process of the recipe, the workers that serve it, and the channel between them."""
