"""JSON schemas, lowered to grammars. Every output of a grammar is valid under its schema. A schema that no grammar can
express is refused with the place in it. Not every valid value can be generated.

A schema becomes alternatives of shapes (demands on values of each type); a shape becomes rules and terminals. Of
llguidance only rules, regular expressions, and their intersections and complements are used.
"""
