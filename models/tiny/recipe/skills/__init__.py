"""The skills, one module each. ``make(rng) -> Item`` draws one item of either split."""
