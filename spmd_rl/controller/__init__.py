"""Talk: the recipe's process, the workers that serve it, and everything that passes between them."""
