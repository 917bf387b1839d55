"""Statistics of scores: means with intervals, paired comparisons, power. Standard library only."""
