"""One run of a recipe: the controller process, its steps and its checkpoints."""
