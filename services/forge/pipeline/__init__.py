"""Pipeline of the forge: a recipe's stages one after the other, each resumable, from a checkpoint to a smaller one."""
