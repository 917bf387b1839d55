"""The processes of Temper and what they are made of."""
