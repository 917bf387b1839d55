"""Parts of an engine as they are put together: its runner, and the tiers of its cache."""
