"""JSON schemas, lowered to grammars of their own: whatever a grammar lets through is valid, and what cannot be said in
a grammar is refused with its place in the schema. Not all that is valid is let through.

A schema becomes alternatives of shapes (what a value of each type must fulfil), a shape becomes rules and terminals. Of
llguidance only rules, regular expressions, and their intersections and complements are used.
"""
