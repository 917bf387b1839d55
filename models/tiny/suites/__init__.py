"""Suites of the tiny model's skills, 200 held-out problems each; `python -m models.tiny.recipe.suites` writes them."""
