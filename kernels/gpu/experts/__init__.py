"""A mixture of experts: routing, grouping of tokens by expert, products with each expert's weights."""
