"""Run of a recipe: the controller's main function, its steps and its checkpoints."""
